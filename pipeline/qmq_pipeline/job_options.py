"""The options that the commands of the pipeline share, and the check of options that need another option."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from qmq_client.commands.settings import config_option, json_option, loaded
from qmq_pipeline.places.outage import WAIT_S, WAIT_S_MAX

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SECONDS_MAX: Final = 100 * 365 * 86_400.0
#: The options that name the source of the logs.
LOG_OPTIONS: Final = ("--path", "--broker")


class Seconds(click.FloatRange):
    """A span of time: a number between a given minimum and a maximum, by default a hundred years."""

    name = "seconds"

    def __init__(self, least_s: float, most_s: float = _SECONDS_MAX) -> None:
        super().__init__(least_s, most_s)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Raises click's usage error. Not left to click, which accepts "nan" in any range."""
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value} is not a number of seconds; write one like 300.", param, ctx)
        return seconds


class DependentOption(click.Option):
    """An option that has an effect only together with another one: without it, `JobCommand` refuses it."""

    def __init__(self, *declared: Any, needs: tuple[str, ...], **named: Any) -> None:
        """`needs`: options of which one must be given, like `--path`, or `--as iceberg` with its value."""
        super().__init__(*declared, **named)
        self.needs = needs


class JobCommand(click.Command):
    """A command with the options of a job; without a source among its options it reads from the configured broker."""

    def invoke(self, ctx: click.Context) -> Any:
        """Raises click's usage error, and `ConfigurationError`."""
        if ctx.params["path"] is None and ctx.params["broker_url"] is None:
            ctx.params["broker_url"] = _configured_broker(ctx.params["config_file"])
        for option in self.params:
            if isinstance(option, DependentOption) and _is_vain(option, ctx):
                needed = " or ".join(option.needs)
                raise click.UsageError(f"{option.opts[0]} needs {needed}", ctx)
        return super().invoke(ctx)


def _configured_broker(config_file: Path | None) -> str | None:
    known = loaded(config_file)
    return known.config.broker.url if known.is_given("broker.url") else None


def _is_vain(option: DependentOption, context: click.Context) -> bool:
    if context.get_parameter_source(option.name) is ParameterSource.DEFAULT:
        return False
    return not any(_is_given(one, context) for one in option.needs)


def _is_given(wanted: str, context: click.Context) -> bool:
    option, _, value = wanted.partition(" ")
    names = (one.name for one in context.command.params if option in one.opts)
    given = [context.params[name] for name in names]
    return any(one not in (None, False) and value in ("", one) for one in given)


def _table_options() -> tuple[Callable[[_Function], _Function], ...]:
    return (
        click.option(
            "--table-format",
            type=click.Choice(("parquet", "delta", "iceberg")),
            default="parquet",
            show_default=True,
            help="Format of the tables; Delta and Iceberg need a connector in Spark's session.",
        ),
        click.option(
            "--namespace",
            default="",
            metavar="NAME",
            help="Namespace for the tables in the session's catalog.",
        ),
    )


def job_options(function: _Function) -> _Function:
    """Options that every job has, so that the same options can be passed to all jobs."""
    for option in reversed(
        (
            click.option(
                "--tables",
                metavar="FOLDER",
                required=True,
                envvar="QMQ_PIPELINE_TABLES",
                help="Where the tables are kept: a folder, or a URL like s3://bucket/path.",
            ),
            click.option(
                "--path", metavar="DIRECTORY", help="Data directory of a broker, or a backup."
            ),
            click.option(
                "--broker",
                "broker_url",
                metavar="URL",
                help="Read from a running broker; by default the configured one, without --path.",
            ),
            click.option(
                "--token-file",
                cls=DependentOption,
                needs=("--broker",),
                metavar="FILE",
                help="Holds the token for the broker.",
            ),
            click.option(
                "--wait",
                "wait_s",
                cls=DependentOption,
                needs=("--broker",),
                type=Seconds(0, WAIT_S_MAX),
                default=WAIT_S,
                show_default=True,
                metavar="SECONDS",
                help="How long to wait for a broker that does not answer; 0 for a second at most.",
            ),
            click.option(
                "--database",
                "databases",
                metavar="URL|NAME",
                multiple=True,
                help="Database with an outbox; all configured ones by default. May be repeated.",
            ),
            *_table_options(),
            config_option,
            json_option,
            click.option("--quiet", is_flag=True, help="No progress."),
        )
    ):
        function = option(function)
    return function


def audit_options(function: _Function) -> _Function:
    """Options of jobs that audit."""
    seconds: dict[str, Any] = {"type": Seconds(0), "show_default": True, "metavar": "SECONDS"}
    for option in reversed(
        (
            click.option(
                "--grace",
                "grace_s",
                default=60.0,
                help="Messages committed this shortly before the end may still be on their way.",
                **seconds,
            ),
            click.option(
                "--late",
                "late_s",
                default=60.0,
                help="A message that was stored longer than this after its commit is late.",
                **seconds,
            ),
            click.option(
                "--since", metavar="TIME", help="Judge messages committed at or after this time."
            ),
            click.option(
                "--until", metavar="TIME", help="Judge messages committed before this time."
            ),
            click.option(
                "--rows-kept",
                is_flag=True,
                help="Every outbox keeps its accepted rows (keep_sent_s).",
            ),
            click.option(
                "--closed-world",
                is_flag=True,
                help="There are no other producers than those of the outboxes.",
            ),
        )
    ):
        function = option(function)
    return function


def skip_option(function: _Function) -> _Function:
    """For jobs that read logs into tables."""
    return click.option(
        "--skip-expired",
        cls=DependentOption,
        needs=LOG_OPTIONS,
        is_flag=True,
        help="Continue after the range that retention has deleted.",
    )(function)


def full_option(function: _Function) -> _Function:
    """For jobs that derive tables from others."""
    text = "Rebuild the tables completely, not only what has changed."
    return click.option("--full", "is_full", is_flag=True, help=text)(function)
