"""`qmq pipeline`: commands that turn messages into tables and audit that none was lost.

Exit codes are those of the other commands: 0 done, nothing found; 1 the audit has findings, or a
job could not continue; 2 wrong call; 3 the broker or a database could not be reached.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import click

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.commands.exit_codes import ATTENTION, DONE, WRONG_CALL
from qmq_pipeline.answers import audit_text, ingested_text
from qmq_pipeline.command import broker_of, running_job, until_signalled
from qmq_pipeline.job_options import (
    LOG_OPTIONS,
    DependentOption,
    JobCommand,
    Seconds,
    audit_options,
    full_option,
    job_options,
    skip_option,
)
from qmq_pipeline.tables.sequences import named

if TYPE_CHECKING:
    from qmq_pipeline.places.config import AuditOptions

_NEEDED: Final = ("pyspark", "pyarrow", "numpy", "pandas")


class _Jobs(click.Group):
    command_class = JobCommand


@click.group(cls=_Jobs)
@click.pass_context
def pipeline(context: click.Context) -> None:
    """Turn messages into tables; audit, report on and replay them (needs Spark)."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing and not set(context.help_option_names) & set(sys.argv):
        click.echo(
            f"Error: not installed: {', '.join(missing)}. The pipeline is an extra: "
            'pip install "qmq[pipeline]", or ".[pipeline]" in the folder of the project',
            err=True,
        )
        context.exit(WRONG_CALL)


@pipeline.command()
@job_options
@skip_option
@click.option(
    "--follow",
    cls=DependentOption,
    needs=LOG_OPTIONS,
    is_flag=True,
    help="Keep ingesting until SIGINT or SIGTERM.",
)
@click.option(
    "--every",
    "every_s",
    cls=DependentOption,
    needs=("--follow",),
    type=Seconds(0.1),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="With --follow: the shortest time between two checks for new messages.",
)
def ingest(*, skip_expired: bool, follow: bool, every_s: float, **options: Any) -> None:
    """Read new data of logs and outboxes into the bronze tables."""
    if follow:
        _follow(every_s, skip_expired=skip_expired, **options)
        return
    from qmq_pipeline.jobs.ingest import check_sources
    from qmq_pipeline.jobs.ingest import ingest as work

    with running_job(options) as job:
        check_sources(job.config)
        done = work(job.spark(), job.config, skip_expired=skip_expired, on_progress=job.on_progress)
        job.answer(asdict(done), ingested_text(done, job.config))


def _follow(every_s: float, *, skip_expired: bool, **options: Any) -> None:
    """Ingest until a signal arrives; prints one line for each batch with rows."""
    from qmq_pipeline.jobs.ingest import check_sources, follow

    with running_job(options) as job:
        check_sources(job.config)
        with until_signalled() as stop:
            batches = follow(
                job.spark(),
                job.config,
                stop,
                every_s=every_s,
                skip_expired=skip_expired,
                on_batch=lambda done: job.line(asdict(done), ingested_text(done, job.config)),
            )
        text = "1 batch" if batches == 1 else f"{batches:,} batches"
        job.answer({"batches": batches}, f"stopped after {text}")


@pipeline.command()
@job_options
@full_option
def lifecycle(*, is_full: bool, **options: Any) -> None:
    """Make one row for each message and group: committed, stored, delivered, settled."""
    from qmq_pipeline.jobs.lifecycle import lifecycle as work

    with running_job(options) as job:
        done = work(job.spark(), job.config, is_full=is_full, on_progress=job.on_progress)
        text = f"{done.lifecycle:,} rows of lifecycle, {done.deliveries:,} of deliveries"
        made = "all" if done.parts_made is None else f"{done.parts_made:,}"
        text += f"; parts made: {made}"
        job.answer(asdict(done), text + (", nothing new" if done.is_unchanged else ""))


@pipeline.command()
@job_options
@full_option
def marts(*, is_full: bool, **options: Any) -> None:
    """Make the gold tables: flow, latency, lag, dead letters, lateness, producers."""
    from qmq_pipeline.jobs.marts import marts as work

    with running_job(options) as job:
        done = work(job.spark(), job.config, is_full=is_full, on_progress=job.on_progress)
        text = ", ".join(f"{count:,} {name}" for name, count in done.rows.items())
        job.answer(asdict(done), text + (", nothing new" if done.is_unchanged else ""))


@pipeline.command()
@job_options
@click.option(
    "--out", metavar="FILE", default="qmq-report.html", show_default=True, help="The report."
)
def report(*, out: str, **options: Any) -> None:
    """Write a report of the tables: one HTML page that opens in any browser."""
    from qmq_pipeline.jobs.report import report as work

    with running_job(options) as job:
        done = work(job.spark(), job.config, out, on_progress=job.on_progress)
        job.answer(asdict(done), f"wrote {done.path}, {done.bytes:,} bytes")


@pipeline.command()
@job_options
@audit_options
def audit(**options: Any) -> None:
    """Compare committed, stored and delivered: lost, ghost, duplicate, late, altered, skipped.

    Exit codes: 0 nothing was found, 1 findings or no log to judge by, 2 wrong call, 3 unreachable.
    """
    from qmq_pipeline.jobs.audit import audit as work

    with running_job(options) as job:
        config = replace(job.config, audit=_audit_options(options))
        done = work(job.spark(), config, on_progress=job.on_progress)
        job.answer(asdict(done), audit_text(done))
        found = not done.is_clean
    sys.exit(ATTENTION if found else DONE)


@pipeline.command()
@job_options
@click.option(
    "--keeper",
    cls=DependentOption,
    needs=("--broker",),
    metavar="NAME",
    help="Name by which the broker waits for this archive.  [default: archive]",
)
@click.option("--no-keeper", is_flag=True, help="Do not let retention wait for this archive.")
def archive(*, keeper: str | None, no_keeper: bool, **options: Any) -> None:
    """Write sealed segments as Parquet into the folder --tables, and verify each row.

    With --broker, retention waits for this archive from then on. With --path and --broker the
    segments are read from the directory, and retention of this broker, which must own the directory, waits.
    """
    from qmq_pipeline.jobs.archive import archive as work
    from qmq_pipeline.jobs.keeping import keeping_of

    if no_keeper and keeper is not None:
        raise click.UsageError(
            "--keeper names the archive that retention waits for, --no-keeper names none: give one of the two"
        )
    read_from = {**options, "broker_url": None} if options["path"] else options
    with running_job(read_from) as job:
        keeping = keeping_of(broker_of(options), name=keeper, is_wanted=not no_keeper)
        done = work(job.spark(), job.config, keeping=keeping, on_progress=job.on_progress)
        strange = f", {done.not_records:,} are not records" if done.not_records else ""
        lost = f"; in quarantine: {named(done.quarantined)}" if done.quarantined else ""
        waits = (
            f"retention waits for keeper {done.keeper}"
            if done.keeper
            else f"retention does not wait: {done.not_waited_for}"
        )
        job.answer(
            asdict(done),
            f"archived {done.messages:,} messages, {done.verified:,} of them verified{strange}{lost}; {waits}",
        )


@pipeline.command()
@job_options
@click.option("--where", required=True, metavar="SQL", help="Condition on the table lifecycle.")
@click.option("--to", required=True, metavar="TARGET", help="subject:NAME or group:NAME.")
@click.option(
    "--name", help="Name of the replay; the same name sends the same ids. By default its time."
)
@click.option(
    "--same-ids", is_flag=True, help="Keep the ids; the broker drops repeats that it remembers."
)
@click.option(
    "--send", "is_sending", is_flag=True, help="Send; without it, only show what would be sent."
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="Maximum number of messages.",
)
def replay(*, where: str, to: str, name: str | None, **options: Any) -> None:
    """Send messages from the tables again, or deliver a group its dead letters again.

    Without --send it only shows what would be sent.
    """
    from qmq_pipeline.jobs.replay import Order, parse_target
    from qmq_pipeline.jobs.replay import replay as work

    with running_job(options) as job:
        target = parse_target(to)
        if target.group is not None and (name or options["same_ids"]):
            raise click.UsageError("--name and --same-ids need --to subject:NAME")
        order = Order(
            where=where,
            target=target,
            name=name or str(SYSTEM_CLOCK.now_ms()),
            with_same_ids=options["same_ids"],
            limit=options["limit"],
        )
        done = work(
            job.spark(),
            job.config,
            order,
            is_sending=options["is_sending"],
            on_progress=job.on_progress,
        )
        verb = "sent" if options["is_sending"] else "would send (give --send to do so)"
        subjects = ", ".join(f"{count:,} of {name}" for name, count in done.subjects.items())
        count = done.sent if options["is_sending"] else done.messages
        repeated = f", {done.repeated:,} were there already" if done.repeated else ""
        job.answer(asdict(done), f"{verb} {count:,}{repeated} to {to}: {subjects or 'nothing'}")


@pipeline.command()
@job_options
@audit_options
@full_option
@skip_option
@click.option(
    "--out", metavar="FILE", default="qmq-report.html", show_default=True, help="The report."
)
def run(*, skip_expired: bool, is_full: bool, out: str, **options: Any) -> None:
    """Run ingest, lifecycle, marts, audit and report, in this order.

    Exit codes: 0 nothing was found, 1 findings or no log to judge by, 2 wrong call, 3 unreachable.
    """
    from qmq_pipeline.jobs.ingest import check_sources
    from qmq_pipeline.jobs.run import run as work

    with running_job(options) as job:
        check_sources(job.config)
        config = replace(job.config, audit=_audit_options(options))
        done = work(
            job.spark(),
            config,
            skip_expired=skip_expired,
            is_full=is_full,
            report_path=out,
            on_progress=job.on_progress,
        )
        lines = [ingested_text(done.ingested, config), audit_text(done.audit)]
        lines += [f"wrote {done.report.path}"] if done.report is not None else []
        job.answer(asdict(done), "\n".join(lines))
        found = not done.audit.is_clean
    sys.exit(ATTENTION if found else DONE)


def _audit_options(options: dict[str, Any]) -> AuditOptions:
    from qmq_pipeline.places.config import AuditOptions
    from qmq_pipeline.places.options import parse_time_ms

    def time_ms(name: str) -> int | None:
        return None if options[name] is None else parse_time_ms(f"--{name}", options[name])

    return AuditOptions(
        grace_s=options["grace_s"],
        late_s=options["late_s"],
        is_closed_world=options["closed_world"],
        are_rows_kept=options["rows_kept"],
        since_ms=time_ms("since"),
        until_ms=time_ms("until"),
    )
