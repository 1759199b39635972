"""`qmq consume module:attribute`: run handlers until SIGTERM or SIGINT.

The name after the colon is a handler, a list of handlers or a `Consumers`; without it, all handlers
of the module run. The working directory is on the import path, as with `python -m`.

A module that cannot be imported is reported in one line: the error, and the lines of the
application's own files that led to it. The whole traceback is logged at debug level.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Final

import click

from qmq_client.commands.exit_codes import ATTENTION
from qmq_client.commands.logs import log_level_option, log_to_stderr
from qmq_client.commands.settings import config_option, json_option, loaded
from qmq_client.consumer import Consumers
from qmq_client.consumer.runner import STOP_DEADLINE_S, StopReport
from qmq_client.errors import ConfigurationError, QmqError
from qmq_client.transport.address import BrokerAddress
from qmq_client.wire.shown import shorten

_LOG: Final = logging.getLogger(__name__)
#: Lines of code shown for a failed import: the failing line and its nearest callers.
_PLACES_MAX: Final = 3
#: Enough for a sentence; some libraries raise errors a page long.
_REASON_CHARACTERS_MAX: Final = 300
_PATHS_OF_PYTHON: Final = ("stdlib", "platstdlib", "purelib", "platlib")


def load_target(target: str) -> object:
    """Import `module` or `module:attribute`; raises `ConfigurationError` if that fails.

    A `QmqError` that the module raises passes unchanged: it has its own remedy and exit code.
    """
    module_name, _, attribute = target.partition(":")
    if module_name.startswith(".") or "/" in module_name or "\\" in module_name:
        name = module_name.replace("\\", "/").rpartition("/")[2].removesuffix(".py").strip(".")
        raise ConfigurationError(
            setting="handlers",
            value=f"{shorten(target)} is a path, not a module name",
            remedy=f"Change to its directory and give {name or 'MODULE'}, or give a dotted name.",
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:  # importing runs the application's code, which may raise any
        _LOG.debug("import_failed module=%s", module_name, exc_info=error)
        if isinstance(error, QmqError):
            raise
        raise _not_imported(target, module_name, error) from error
    try:
        for name in attribute.split(".") if attribute else ():
            found = getattr(found, name)
    except AttributeError as error:
        raise ConfigurationError(
            setting="handlers",
            value=f"{shorten(target)} ({shorten(str(error))})",
            remedy=f"Give module:attribute with an attribute of module {module_name}.",
        ) from error
    return found


def _not_imported(target: str, module_name: str, error: Exception) -> ConfigurationError:
    missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    is_missing_itself = missing is not None and f"{module_name}.".startswith(f"{missing}.")
    places = _places(error)
    if module_name.endswith(".py"):
        value = f"{shorten(target)} is the name of a file"
        remedy = f"Give the module without .py: {module_name.removesuffix('.py')}."
    elif is_missing_itself or not places:
        value = f"{shorten(target)} ({_reason(error)})"
        remedy = "Give module or module:attribute, importable from here."
    elif missing is not None:
        value = f"{shorten(target)} was found, but imports {missing}, which is missing ({places})"
        remedy = f"Install {missing}, or fix the import."
    else:
        value = f"{shorten(target)} was found, but its import failed: {_reason(error)} ({places})"
        remedy = "Fix the module; --log-level debug shows the whole traceback."
    return ConfigurationError(setting="handlers", value=value, remedy=remedy)


def _reason(error: Exception) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    line = " ".join(f"{type(error).__name__}: {text}".split())
    return line if len(line) <= _REASON_CHARACTERS_MAX else f"{line[:_REASON_CHARACTERS_MAX]}…"


def _places(error: Exception) -> str:
    """The lines that led to an error, outermost first: `shop.py:3 > settings.py:9 in load`.

    Empty if no code of a module ran.
    """
    frames = [
        (frame.filename, frame.lineno, frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen ") and frame.filename != __file__
    ]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno, "<module>"))
    of_python = tuple(f"{sysconfig.get_path(name)}/" for name in _PATHS_OF_PYTHON)
    own = [frame for frame in frames if not frame[0].startswith(of_python)] or frames
    return " > ".join(
        f"{_seen_from_here(filename)}:{line}" + ("" if name == "<module>" else f" in {name}")
        for filename, line, name in own[-_PLACES_MAX:]
    )


def _seen_from_here(filename: str) -> str:
    path = Path(filename)
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="MODULE[:ATTRIBUTE]...")
@click.option(
    "--broker", metavar="URL", help="Broker; by default QMQ_BROKER_URL, then the configuration."
)
@click.option(
    "--stop-deadline",
    "stop_deadline_s",
    type=click.FloatRange(0, 3600),
    default=STOP_DEADLINE_S,
    show_default=True,
    help="Seconds for running handlers to finish after a signal.",
)
@click.option("--consumer-id", metavar="NAME", help="Name of this process, for named broadcasts.")
@log_level_option
@config_option
@json_option
def consume(
    targets: tuple[str, ...],
    *,
    broker: str | None,
    stop_deadline_s: float,
    consumer_id: str | None,
    log_level: str,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Run the handlers of MODULE (or one ATTRIBUTE of it) until a signal.

    The first SIGTERM or SIGINT waits for running handlers; a second one stops at once. Exit code 1
    when a handler did not finish or an outcome could not be sent; its message is delivered again.
    With --json, print at the end the result of the stop and the counters of each handler.
    """
    log_to_stderr(log_level)
    sources = [load_target(target) for target in targets]
    if len(sources) == 1 and isinstance(sources[0], Consumers):
        consumers = sources[0]
        _refuse_flags(targets[0], broker=broker, consumer_id=consumer_id)
    else:
        flags = {} if broker is None else {"broker.url": broker}
        address = BrokerAddress.of_section(loaded(config_file, flags=flags).config.broker)
        consumers = Consumers(sources, address, consumer_id=consumer_id)
    report = consumers.run(stop_deadline_s=stop_deadline_s)
    if as_json:
        click.echo(_as_json(report, consumers))
    if not report.is_clean:
        raise SystemExit(ATTENTION)


def _as_json(report: StopReport, consumers: Consumers) -> str:
    return json.dumps(
        {
            "is_clean": report.is_clean,
            "running": report.running,
            "unsettled": report.unsettled,
            "handlers": consumers.counters(),
        }
    )


def _refuse_flags(target: str, **flags: str | None) -> None:
    """Refuse options that a `Consumers` has set already: its broker and its consumer id."""
    for name, value in flags.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigurationError(
                setting=option,
                value=f"{shorten(value)}, but {shorten(target)} is a Consumers with its own",
                remedy=f"Leave {option} out, or name its handlers instead.",
            )
