"""`qmq up`: runs a broker and a watchdog with one command, for development or one small machine.

Each runs as the ordinary command (`qmq broker serve`, `qmq watchdog run`) in its own process. This
process starts both and waits. When one of them ends or a signal arrives, it stops the others: first
the watchdog, so that the broker still answers its last requests. It touches neither messages nor
files, and reads only the settings that the two commands read.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import click

from qmq_client.commands.exit_codes import DONE
from qmq_client.commands.logs import log_level_option
from qmq_client.commands.settings import config_option, loaded
from qmq_client.errors import ConfigurationError
from qmq_client.settings.sections import Config
from qmq_client.signal_flag import SignalFlag

_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Interval at which children and signals are checked.
_LOOK_S: Final = 0.25
_QMQ: Final = (sys.executable, "-m", "qmq_client")


@click.command()
@click.option(
    "--data",
    "directory",
    default="qmq-data",
    show_default=True,
    type=click.Path(file_okay=False),
    help="The broker's data directory; created if it does not exist.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Address on which the broker listens; by default that of the configured broker.url.",
)
@click.option(
    "--database",
    "databases",
    metavar="URL|NAME",
    multiple=True,
    help="A database for the watchdog, by URL or configured name; may be repeated. All by default.",
)
@click.option(
    "--migrate", is_flag=True, help="First create or upgrade the tables in these databases."
)
@config_option
@log_level_option
def up(
    *,
    directory: str,
    listen: str | None,
    databases: tuple[str, ...],
    migrate: bool,
    config_file: Path | None,
    log_level: str,
) -> None:
    """Run a broker and, for the databases, a watchdog until SIGTERM or Ctrl-C.

    Without a database only the broker runs. After a second signal it does not wait for them. When one of the
    two ends by itself, the other is stopped, and its exit code is that of this command; otherwise 0
    if both stopped cleanly.
    """
    flags = {} if listen is None else {"broker.url": f"http://{listen}"}
    config = loaded(config_file, databases, flags).config
    _check(config, listen)
    files = [] if config_file is None else ["--config", str(config_file)]
    if migrate:
        _migrate(databases or [section.name for section in config.databases], files)
    level = ["--log-level", log_level]
    address = urlsplit(config.broker.url).netloc
    children = [_Child("broker", ["serve", "--data", directory, "--listen", address, *level])]
    if config.databases or config.registry.url:
        named = [word for name in databases for word in ("--database", name)]
        to_broker = ["--broker", config.broker.url]
        children.append(_Child("watchdog", ["run", *to_broker, *named, *files, *level]))
    else:
        click.echo("No database is configured, so no watchdog runs: give --database.", err=True)
    raise SystemExit(_run(children))


@dataclass(slots=True)
class _Child:
    """A `qmq` command that runs in its own process."""

    name: str
    words: Sequence[str]
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Start it in its own process group, so that Ctrl-C in the terminal reaches only this process."""
        self.process = subprocess.Popen([*_QMQ, self.name, *self.words], process_group=0)

    @property
    def exit_code(self) -> int | None:
        """None while it runs, 0 before the start; 128 plus the number of a signal that ended it, as in a shell."""
        code = DONE if self.process is None else self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def stop(self, hurried: SignalFlag) -> None:
        """Send SIGTERM and wait for its end; if `hurried` is set meanwhile, send a second SIGTERM."""
        if self.process is None:
            return
        self.process.terminate()
        while self.exit_code is None and not hurried.wait(_LOOK_S):
            pass
        if self.exit_code is None:
            self.process.terminate()  # at a second signal both commands end at once
            self.process.wait()


def _check(config: Config, listen: str | None) -> None:
    """Refuse an address that this command cannot serve: TLS, a path, or no port."""
    url = urlsplit(config.broker.url)
    setting = "broker.url" if listen is None else "--listen"
    if url.scheme != "http" or url.path.strip("/"):
        remedy = "Serve TLS, or below a path, by `qmq broker serve` and `qmq watchdog run`."
        raise ConfigurationError(setting=setting, value=config.broker.url, remedy=remedy)
    if url.port is None:
        remedy = "Give HOST:PORT, like 127.0.0.1:9470."
        raise ConfigurationError(setting=setting, value=url.netloc, remedy=remedy)


def _migrate(databases: Sequence[str], files: Sequence[str]) -> None:
    """Create or upgrade the tables of each database; exit with the first code that is not 0."""
    if not databases:
        remedy = "Give --database URL, or leave it out."
        raise ConfigurationError(
            setting="--migrate", value="no database is configured", remedy=remedy
        )
    for database in databases:
        code = subprocess.call([*_QMQ, "db", "migrate", "--database", database, *files])
        if code != DONE:
            raise SystemExit(code)


def _run(children: Sequence[_Child]) -> int:
    """Run the children until a signal, or until one of them ends; returns the exit code."""
    stopping, hurried = SignalFlag(), SignalFlag()

    def on_signal(_number: int, _frame: object) -> None:
        (hurried if stopping.is_set() else stopping).set()

    for number in _STOP_SIGNALS:
        signal.signal(number, on_signal)
    ended = None
    try:
        for child in children:
            child.start()
        while ended is None and not stopping.wait(_LOOK_S):
            ended = next((child for child in children if child.exit_code is not None), None)
    finally:
        for child in reversed(children):
            child.stop(hurried)
    if ended is not None:
        click.echo(f"The {ended.name} ended with exit code {ended.exit_code}.", err=True)
        return ended.exit_code or DONE
    return next((code for child in children if (code := child.exit_code)), DONE)
