"""`qmq watchdog run | sweep`: the daemon, or one bounded pass for cron.

Exit codes of `sweep`: 0 everything due was sent or nothing was due; 1 rows failed, were parked or are
left over; 2 wrong call or configuration, or a database without the tables; 3 the broker or a database
could not be reached. With several databases the gravest counts: 2, then 3, then 1.

Exit codes of `run`: 0 stopped cleanly; 1 a sweep did not end in time and was abandoned, its rows fall
due again; 2 wrong call or configuration.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

import click

from qmq_client.commands.exit_codes import ATTENTION, DONE, UNREACHABLE, WRONG_CALL, exit_code_of
from qmq_client.commands.logs import log_level_option, log_to_stderr
from qmq_client.commands.settings import config_option, json_option, loaded
from qmq_client.config import BrokerSection, Config, WatchdogSection
from qmq_client.errors import ConfigurationError
from qmq_client.transport.http import HttpTransport
from qmq_watchdog.daemon import Daemon, DaemonOptions
from qmq_watchdog.databases import open_databases
from qmq_watchdog.events import LOGGER, event_line, log_event
from qmq_watchdog.once import sweep_all
from qmq_watchdog.sweep import Sweep, SweepCounts, SweepOptions

#: How often the daemon looks at the wall clock.
_LOOK_S: Final = 1.0
_GRAVEST_FIRST: Final = (WRONG_CALL, UNREACHABLE, ATTENTION)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _default(value: object) -> str:
    """The built-in value; files and the environment may have set another."""
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


@watchdog.command()
@_options
@json_option
def sweep(*, as_json: bool, **options: Any) -> None:
    """Do one bounded pass over every database.

    Exit code: 0 all that was due was sent; 1 rows failed, were parked or are left; 2 wrong call or
    configuration; 3 broker or a database unreachable.
    """
    config = _configuration(options)
    sweeps = _sweeps(config)
    deadline_s = config.watchdog.sweep_s_max + config.watchdog.stop_s
    results, are_all_ended = sweep_all(sweeps, deadline_s)
    exit_code = _exit_code(results.values())
    if as_json:
        click.echo(json.dumps(_as_json(results, exit_code), indent=2))
    else:
        for name, counts in results.items():
            click.echo(event_line("sweep", {"database": name, **counts.as_fields()}))
    _leave(exit_code, is_clean=are_all_ended)


@watchdog.command()
@_options
@click.option(
    "--poll-s",
    type=float,
    help=f"Wait between sweeps when nothing is due. {_default(WatchdogSection().poll_s)}",
)
@log_level_option
def run(*, log_level: str, **options: Any) -> None:
    """Sweep all databases until SIGTERM or Ctrl-C.

    Logs to standard error.

    Exit code: 0 stopped cleanly; 1 a sweep did not end in time; 2 wrong call or configuration.
    """
    config = _configuration(options)
    log_to_stderr("debug" if log_level == "debug" else "warning")  # of everybody else
    LOGGER.setLevel(log_level.upper())
    stopping = _on_signals()
    daemon = Daemon(_sweeps(config), DaemonOptions.from_config(config.watchdog))
    names = ",".join(section.name for section in config.databases)
    log_event("watchdog.started", databases=names, process=os.getpid())
    daemon.start()
    while not stopping.wait(_LOOK_S):
        daemon.step()
    is_clean = daemon.stop(config.watchdog.stop_s)
    log_event(
        "watchdog.stopped" if is_clean else "watchdog.abandoned",
        level=logging.INFO if is_clean else logging.ERROR,
    )
    _leave(DONE if is_clean else ATTENTION, is_clean=is_clean)


def _configuration(options: Mapping[str, Any]) -> Config:
    flags = {
        "broker.url": options["broker"],
        "watchdog.batch_rows": options["batch_rows"],
        "watchdog.lease_ms": options["lease_ms"],
        "watchdog.max_attempts": options["max_attempts"],
        "watchdog.poll_s": options.get("poll_s"),
    }
    config = loaded(options["config_file"], options["databases"], flags).config
    if not config.databases:
        raise ConfigurationError(
            setting="database",
            value="none is configured",
            remedy="Give --database URL, or [[database]] in qmq.toml.",
        )
    return config


def _sweeps(config: Config) -> list[Sweep]:
    """One sweep for each database, with connections of its own to the broker."""
    options = SweepOptions.from_config(config.watchdog)
    return [
        Sweep(database, HttpTransport(config.broker.url), options)
        for database in open_databases(config.databases, os.environ)
    ]


def _exit_code(results: Iterable[SweepCounts]) -> int:
    codes = {_exit_code_of_one(counts) for counts in results}
    return next((code for code in _GRAVEST_FIRST if code in codes), DONE)


def _exit_code_of_one(counts: SweepCounts) -> int:
    if counts.error is not None:
        return exit_code_of(counts.error)
    if counts.unreachable:
        return UNREACHABLE
    is_left = counts.failed or counts.parked or counts.is_cut_short
    return ATTENTION if is_left else DONE


def _as_json(results: Mapping[str, SweepCounts], exit_code: int) -> dict[str, Any]:
    totals = {
        name: sum(getattr(counts, name) for counts in results.values())
        for name in ("claimed", "sent", "failed", "parked", "lost")
    }
    databases = [{"database": name, **counts.as_fields()} for name, counts in results.items()]
    return {"exit_code": exit_code, **totals, "databases": databases}


def _on_signals() -> threading.Event:
    """An event that the first SIGTERM or SIGINT sets; the second one kills."""
    stopping = threading.Event()

    def on_signal(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return stopping


def _leave(exit_code: int, *, is_clean: bool) -> None:
    """End this process; at once when threads still hang in a database that does not answer."""
    if is_clean:
        raise SystemExit(exit_code)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
