"""`qmq consume module:attribute`: run handlers until SIGTERM or SIGINT.

The name after the colon is a handler, a list of handlers or a `Consumers`; without it, all handlers
of the module run. The working directory is on the import path, as with `python -m`.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from qmq_client.commands.exit_codes import ATTENTION
from qmq_client.commands.logs import log_level_option, log_to_stderr
from qmq_client.commands.settings import config_option, json_option, loaded
from qmq_client.commands.targets import load_target
from qmq_client.consumer import Consumers
from qmq_client.consumer.runner import STOP_DEADLINE_S, StopReport
from qmq_client.errors import ConfigurationError
from qmq_client.transport.address import BrokerAddress
from qmq_client.wire.shown import shorten


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

    The first SIGTERM or SIGINT lets running handlers finish, a second one does not wait. Exit code 1
    when a handler did not finish or an outcome could not be sent; its message is delivered again.
    With --json it prints at the end how the stop went and what each handler counted.
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
    """A `Consumers` has a broker and a name already."""
    for name, value in flags.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigurationError(
                setting=option,
                value=f"{shorten(value)}, and {shorten(target)} is a Consumers",
                remedy=f"Leave {option} out, or name its handlers instead.",
            )
