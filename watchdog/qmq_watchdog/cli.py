"""`qmq watchdog run | sweep | databases`: the daemon, one bounded pass for cron, the registry.

Exit codes of `sweep`, and of `run --once`, which is the same:

====  ==========================================================================================
0     everything due was sent or nothing was due, and no row is parked
1     rows failed, were parked or are left over, or rows parked earlier still wait for a person
2     wrong call or configuration, or a database whose tables are missing or differ
3     the broker or a database could not be reached, or is a read-only replica
====  ==========================================================================================

With several databases the most serious code counts: 2, then 3, then 1; all are swept.

Exit codes of `run`: 0 stopped cleanly; 1 a sweep did not end in time and was abandoned, its rows fall
due again; 2 wrong call or configuration.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, NoReturn, TypeVar

import click
import msgspec

from qmq_client.commands.exit_codes import ATTENTION, DONE, UNREACHABLE, WRONG_CALL, exit_code_of
from qmq_client.commands.logs import log_level_option, log_to_stderr
from qmq_client.commands.settings import config_option, json_option, loaded
from qmq_client.errors import ConfigurationError
from qmq_client.settings.config import LoadedConfig
from qmq_client.settings.sections import BrokerSection, RegistrySection, WatchdogSection
from qmq_client.signal_flag import SignalFlag
from qmq_client.transport.address import BrokerAddress
from qmq_client.transport.http import HttpTransport
from qmq_watchdog.events import LOGGER, event_line
from qmq_watchdog.once import open_all, sweep_all
from qmq_watchdog.registry_cli import databases
from qmq_watchdog.service import Service
from qmq_watchdog.sweep import Sweep, SweepCounts, SweepOptions

_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_GRAVEST_FIRST: Final = (WRONG_CALL, UNREACHABLE, ATTENTION)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _default(value: object) -> str:
    """The help text of a default; files and the environment may have set another value."""
    return f"[default: {value}, or as configured]"


def _options(function: _Function) -> _Function:
    """Add the options that `run` and `sweep` share."""
    built_in = WatchdogSection()
    for option in reversed(
        (
            click.option(
                "--database",
                "databases",
                metavar="URL|NAME",
                multiple=True,
                help="A database by URL or configured name; may be repeated. All by default.",
            ),
            config_option,
            click.option(
                "--broker",
                metavar="URL",
                help=f"Where the broker listens. {_default(BrokerSection().url)}",
            ),
            click.option(
                "--batch-rows",
                type=int,
                help=f"Rows of one claim and one request. {_default(built_in.batch_rows)}",
            ),
            click.option(
                "--lease-ms",
                type=int,
                help=f"How long a claim lasts. {_default(built_in.lease_ms)}",
            ),
            click.option(
                "--max-attempts",
                type=int,
                help=f"Bad answers after which a row is parked. {_default(built_in.max_attempts)}",
            ),
        )
    ):
        function = option(function)
    return function


@click.group()
def watchdog() -> None:
    """Send the outbox rows that a dead or slow process left behind."""


watchdog.add_command(databases)


def _once_options(function: _Function) -> _Function:
    """Add the options of a single pass."""
    ignore = click.option(
        "--ignore-parked",
        is_flag=True,
        help="Exit with 0 even if rows parked by earlier sweeps still wait.",
    )
    return ignore(json_option(function))


@watchdog.command()
@_options
@_once_options
@log_level_option
def sweep(*, log_level: str, as_json: bool, ignore_parked: bool, **options: Any) -> None:
    """Do one bounded pass over every database.

    Exit code: 0 all that was due was sent and nothing is parked; 1 rows failed, are parked or left;
    2 wrong call or configuration; 3 broker or a database unreachable.
    """
    _log(log_level)
    _sweep_once(options, as_json=as_json, ignore_parked=ignore_parked)


@watchdog.command()
@_options
@click.option(
    "--poll-s",
    type=float,
    help=f"Wait between sweeps when nothing is due. {_default(WatchdogSection().poll_s)}",
)
@click.option(
    "--metrics-listen",
    metavar="HOST:PORT",
    help="Serve /metrics and /healthz there, like 127.0.0.1:9471; off by default.",
)
@click.option("--once", is_flag=True, help="Do one pass and exit: the same as sweep.")
@_once_options
@log_level_option
def run(*, log_level: str, once: bool, as_json: bool, ignore_parked: bool, **options: Any) -> None:
    """Sweep all databases until SIGTERM or Ctrl-C.

    Logs to standard error. SIGHUP reads the configuration again and applies its databases.

    Exit code: 0 stopped cleanly; 1 a sweep did not end in time; 2 wrong call or configuration; with
    --once those of sweep.
    """
    _log(log_level)
    if once:
        _refuse_with_once(options)
        _sweep_once(options, as_json=as_json, ignore_parked=ignore_parked)
    known = _loaded(options)
    service = Service(known.config, os.environ, broker_from=known.origin_of("broker.url"))
    stopping, reloading = _on_signals()
    is_clean = service.run(stopping, reloading, lambda: _loaded(options).config)
    _leave(DONE if is_clean else ATTENTION, is_clean=is_clean)


def _refuse_with_once(options: Mapping[str, Any]) -> None:
    """Refuse options of the daemon together with --once; from a file or the environment they are ignored."""
    for name in ("metrics_listen", "poll_s"):
        if options[name] is not None:
            raise ConfigurationError(
                setting=f"--{name.replace('_', '-')}",
                value="given with --once, but it has no effect on a single pass",
                remedy="Leave out one of the two.",
            )


def _log(log_level: str) -> None:
    log_to_stderr("debug" if log_level == "debug" else "warning")  # of all other libraries
    LOGGER.setLevel(log_level.upper())


def _sweep_once(options: Mapping[str, Any], *, as_json: bool, ignore_parked: bool) -> NoReturn:
    config = _loaded(options).config
    opened, refused = open_all(config, os.environ)
    transport = HttpTransport(BrokerAddress.of_section(config.broker))
    limits = SweepOptions.from_config(config.watchdog)
    sweeps = [Sweep(database, transport, limits) for database in opened]
    deadline_s = config.watchdog.sweep_s_max + config.watchdog.stop_s
    results, are_all_ended = sweep_all(sweeps, deadline_s, limits=config.watchdog)
    if are_all_ended:
        transport.close()
    results |= {name: SweepCounts(error=error) for name, error in refused.items()}
    exit_code = _exit_code(results.values(), ignore_parked=ignore_parked)
    if as_json:
        click.echo(json.dumps(_as_json(results, exit_code), indent=2))
    else:
        for name, counts in results.items():
            click.echo(event_line("sweep", {"database": name, **counts.as_fields()}))
    _leave(exit_code, is_clean=are_all_ended)


def _loaded(options: Mapping[str, Any]) -> LoadedConfig:
    flags = {
        "broker.url": options["broker"],
        "watchdog.batch_rows": options["batch_rows"],
        "watchdog.lease_ms": options["lease_ms"],
        "watchdog.max_attempts": options["max_attempts"],
        "watchdog.poll_s": options.get("poll_s"),
        "watchdog.metrics_listen": options.get("metrics_listen"),
    }
    known = loaded(options["config_file"], options["databases"], flags)
    if options["databases"]:
        config = msgspec.structs.replace(known.config, registry=RegistrySection())
        known = replace(known, config=config)
    if not known.config.databases and not known.config.registry.url:
        raise ConfigurationError(
            setting="database",
            value="none is configured",
            remedy="Give --database URL, or [[database]] or [registry] in qmq.toml.",
        )
    return known


def _exit_code(results: Iterable[SweepCounts], *, ignore_parked: bool) -> int:
    codes = {_exit_code_of_one(counts, ignore_parked=ignore_parked) for counts in results}
    return next((code for code in _GRAVEST_FIRST if code in codes), DONE)


def _exit_code_of_one(counts: SweepCounts, *, ignore_parked: bool) -> int:
    if counts.error is not None:
        return exit_code_of(counts.error)
    if counts.unreachable:
        return UNREACHABLE
    is_waiting = bool(counts.parked_total) and not ignore_parked
    is_left = counts.failed or counts.parked or counts.is_cut_short or is_waiting
    return ATTENTION if is_left else DONE


def _as_json(results: Mapping[str, SweepCounts], exit_code: int) -> dict[str, Any]:
    totals = {
        name: sum(getattr(counts, name) for counts in results.values())
        for name in ("claimed", "sent", "failed", "parked", "held", "lost")
    }
    databases = [{"database": name, **counts.as_fields()} for name, counts in results.items()]
    return {"exit_code": exit_code, **totals, "databases": databases}


def _on_signals() -> tuple[SignalFlag, SignalFlag]:
    """The flags for stopping and reloading: the first SIGTERM or SIGINT sets one (a second ends the
    process), SIGHUP the other.
    """
    stopping, reloading = SignalFlag(), SignalFlag()

    def on_signal(_number: int, _frame: object) -> None:
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        stopping.set()

    for number in _STOP_SIGNALS:
        signal.signal(number, on_signal)
    signal.signal(signal.SIGHUP, lambda _number, _frame: reloading.set())
    return stopping, reloading


def _leave(exit_code: int, *, is_clean: bool) -> NoReturn:
    """End this process; at once when threads still hang in a database that does not answer."""
    if is_clean:
        raise SystemExit(exit_code)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
