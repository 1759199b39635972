"""`qmq pipeline`: the life of every message as tables, and the proof that none was lost.

Exit codes, the same as of the other commands: 0 done and nothing found; 1 the audit has findings, or
a job could not go on; 2 wrong call; 3 the broker or a database could not be reached.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import msgspec

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.commands.exit_codes import ATTENTION, DONE, UNREACHABLE, WRONG_CALL, exit_code_of
from qmq_client.commands.settings import config_option, json_option, loaded
from qmq_client.wire.errors import QmqError
from qmq_pipeline.errors import LakeError, OptionError, SourceError, UnreachableError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from qmq_pipeline.config import AuditOptions, PipelineConfig
    from qmq_pipeline.jobs.audit import AuditResult
    from qmq_pipeline.jobs.progress import Progress

_Function = TypeVar("_Function", bound=Callable[..., Any])
_WRONG_CALLS: Final = (OptionError, LakeError)
#: A line of progress is written over the one before, at most so often.
_SHOW_S: Final = 0.2


@click.group()
def pipeline() -> None:
    """Bring messages into tables, audit them, report on them, replay them (needs Spark)."""


def job_options(function: _Function) -> _Function:
    """Options that every job has."""
    for option in reversed(
        (
            click.option(
                "--tables",
                metavar="FOLDER",
                required=True,
                envvar="QMQ_PIPELINE_TABLES",
                help="Where the tables are kept: a folder, or a URL like s3a://bucket/path.",
            ),
            click.option("--path", metavar="DIRECTORY", help="Data directory, backup or archive."),
            click.option(
                "--broker", "broker_url", metavar="URL", help="Read from a running broker."
            ),
            click.option("--token-file", metavar="FILE", help="Holds the token for the broker."),
            click.option(
                "--database",
                "databases",
                metavar="URL|NAME",
                multiple=True,
                help="Database with an outbox; all configured ones by default. May be repeated.",
            ),
            config_option,
            json_option,
            click.option("--quiet", is_flag=True, help="No progress."),
        )
    ):
        function = option(function)
    return function


@pipeline.command()
@job_options
@click.option("--skip-expired", is_flag=True, help="Go on behind what retention has given up.")
def ingest(*, skip_expired: bool, **options: Any) -> None:
    """Bring what is new in logs and outboxes into the bronze tables."""
    from qmq_pipeline.jobs.ingest import Ingested
    from qmq_pipeline.jobs.ingest import ingest as ingest_logs
    from qmq_pipeline.jobs.ingest_outbox import ingest_outbox

    with _job(options) as job:
        spark, config = job.spark(), job.config
        # The outboxes first: what they show as sent is in the log when that is read.
        outbox = ingest_outbox(spark, config, on_progress=job.on_progress)
        done = Ingested(rows={}, next_offsets={}, quarantined=0, ranges=0)
        if config.place is not None or not config.databases:
            done = ingest_logs(
                spark, config, skip_expired=skip_expired, on_progress=job.on_progress
            )
        rows = {**done.rows, **({"outbox": sum(outbox.values())} if outbox else {})}
        answer = {**asdict(done), "rows": rows, "outbox": outbox}
        job.answer(answer, _ingested_text(rows, done.quarantined))


@pipeline.command()
@job_options
def lifecycle(**options: Any) -> None:
    """Make one row for each message and group: committed, stored, delivered, settled."""
    from qmq_pipeline.jobs.lifecycle import lifecycle as work

    with _job(options) as job:
        done = work(job.spark(), job.config, on_progress=job.on_progress)
        text = f"{done.lifecycle:,} rows of lifecycle, {done.deliveries:,} of deliveries"
        job.answer(asdict(done), text + (", nothing new" if done.is_unchanged else ""))


@pipeline.command()
@job_options
@click.option("--grace", "grace_s", type=float, default=60.0, show_default=True, metavar="SECONDS")
@click.option("--late", "late_s", type=float, default=60.0, show_default=True, metavar="SECONDS")
@click.option("--since", metavar="TIME", help="Judge what was committed from then on.")
@click.option("--until", metavar="TIME", help="Judge what was committed before.")
@click.option("--rows-kept", is_flag=True, help="Accepted rows stay in every outbox (keep_sent_s).")
@click.option("--closed-world", is_flag=True, help="No message comes from other producers.")
@click.option("--cross-check", is_flag=True, help="Join everything instead of comparing bitmaps.")
def audit(*, cross_check: bool, **options: Any) -> None:
    """Compare committed, stored and delivered: lost, ghost, duplicate, late, altered.

    Exit codes: 0 nothing was found, 1 findings, 2 wrong call, 3 unreachable.
    """
    from qmq_pipeline.jobs.audit import audit as work

    with _job(options) as job:
        config = replace(job.config, audit=_audit_options(options))
        done = work(job.spark(), config, cross_check=cross_check, on_progress=job.on_progress)
        job.answer(asdict(done), audit_text(done))
        found = not done.is_clean
    sys.exit(ATTENTION if found else DONE)


def audit_text(done: AuditResult) -> str:
    """The verdict in some lines."""
    counts = ", ".join(f"{count:,} {kind}" for kind, count in done.findings.items())
    lines = [
        f"{'CLEAN' if done.is_clean else 'FINDINGS'}: {counts}",
        f"  judged as of {done.as_of.isoformat()}: {done.committed:,} committed, {done.stored:,} stored, "
        f"{done.delivered:,} of {done.expected:,} delivered, {done.settled:,} settled",
        *(f"  not judged: {reason}" for reason in done.coverage),
    ]
    return "\n".join(lines)


def _audit_options(options: dict[str, Any]) -> AuditOptions:
    from qmq_pipeline.config import AuditOptions
    from qmq_pipeline.options import parse_time_ms

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


class Job:
    """One command under way: its configuration, its session, and how it speaks."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.config = _config(options)
        self._is_quiet = options["quiet"]
        self._as_json = options["as_json"]
        self._shown_s = 0.0
        self._began_s = SYSTEM_CLOCK.monotonic_s()

    def spark(self) -> SparkSession:
        """The session; made when it is first asked for."""
        from qmq_pipeline.session import get_session

        self._say("starting Spark …")
        return get_session()

    def on_progress(self, progress: Progress) -> None:
        """Show how far the job is."""
        now_s = SYSTEM_CLOCK.monotonic_s()
        if now_s - self._shown_s < _SHOW_S and progress.done < progress.total:
            return
        self._shown_s = now_s
        rate = progress.rows / max(now_s - self._began_s, 0.001)
        width = 24
        done = round(width * progress.done / max(progress.total, 1))
        bar = "█" * done + "·" * (width - done)
        self._say(f"{progress.stage:<18} {bar} {progress.rows:>12,} rows {rate:>10,.0f}/s")

    def answer(self, values: Any, text: str) -> None:
        """Say what came of it."""
        self._clear()
        if self._as_json:
            click.echo(msgspec.json.encode(values))
        else:
            click.echo(f"{text} ({SYSTEM_CLOCK.monotonic_s() - self._began_s:.1f} s)")

    def _say(self, text: str) -> None:
        if not self._is_quiet and sys.stderr.isatty():
            click.echo(f"\r\x1b[K{text}", nl=False, err=True)

    def _clear(self) -> None:
        if not self._is_quiet and sys.stderr.isatty():
            click.echo("\r\x1b[K", nl=False, err=True)


@contextmanager
def _job(options: dict[str, Any]) -> Iterator[Job]:
    """Run a job; whatever it fails with becomes one line and an exit code."""
    from qmq_pipeline.explain import explain
    from qmq_pipeline.session import log_path

    try:
        yield Job(options)
    except (click.exceptions.Exit, click.ClickException, SystemExit):
        raise
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        _stop()
        sys.exit(130)
    except Exception as error:  # the outermost place of a command: nothing above would be clearer
        told = explain(error, str(log_path()))
        click.echo(f"\rError: {' '.join(str(told).split())}", err=True)
        _stop()
        sys.exit(_exit_code(told))
    _stop()


def _stop() -> None:
    """End the session, if there is one; Spark's own farewell is not for the reader."""
    if "pyspark" in sys.modules:
        from pyspark.sql import SparkSession

        session = SparkSession.getActiveSession()
        if session is not None:
            session.stop()


def _exit_code(error: QmqError) -> int:
    if isinstance(error, _WRONG_CALLS):
        return WRONG_CALL
    if isinstance(error, UnreachableError):
        return UNREACHABLE
    if isinstance(error, SourceError) and type(error) is SourceError:
        return WRONG_CALL
    return exit_code_of(error)


def _config(options: dict[str, Any]) -> PipelineConfig:
    from qmq_pipeline.config import PipelineConfig
    from qmq_pipeline.options import Place

    known = loaded(options["config_file"], options["databases"])
    path, broker_url = options["path"], options["broker_url"]
    if path and broker_url:
        raise OptionError(
            option="--path",
            value="given beside --broker",
            allowed="one of both",
            remedy="Read the directory, or ask the broker.",
        )
    place = None
    if path or broker_url:
        place = Place(path=path, broker_url=broker_url, token_file=options["token_file"])
    return PipelineConfig(
        tables=_folder(options["tables"]), place=place, databases=known.config.databases
    )


def _folder(given: str) -> str:
    """A local folder as an absolute path: workers may stand elsewhere."""
    return given if "://" in given else str(Path(given).absolute())


def _ingested_text(rows: dict[str, int], quarantined: int) -> str:
    parts = [f"{count:,} {name}" for name, count in rows.items()] or ["nothing new"]
    lost = f"; {quarantined:,} sequences stand in quarantine" if quarantined else ""
    return f"ingested {', '.join(parts)}{lost}"
