"""The parts that all commands of the pipeline share: configuration, session, progress, reports of errors.

Progress is the number of finished tasks in Spark's active stages: a thread reads them meanwhile, and Spark Connect tells
them. A terminal shows one line, redrawn in place. A log, as cron and Airflow keep it, gets a line at the end of each stage of a job, and one
every `LINE_S` during a long one.
"""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TextIO

import click
import msgspec

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.commands.exit_codes import UNREACHABLE, WRONG_CALL, exit_code_of
from qmq_client.commands.settings import loaded
from qmq_client.signal_flag import SignalFlag
from qmq_client.wire.errors import QmqError
from qmq_pipeline.errors import JavaError, OptionError, SourceError, TablesError, UnreachableError
from qmq_pipeline.jobs.progress import Progress

if TYPE_CHECKING:
    from pyspark import StatusTracker
    from pyspark.sql import SparkSession

    from qmq_pipeline.jobs.progress import Progress
    from qmq_pipeline.places.config import PipelineConfig
    from qmq_pipeline.places.options import Place

LOOK_S: Final = 1.0
#: Lines stay in a log: a run of an hour leaves some hundred.
LINE_S: Final = 30.0
_WIDTH: Final = 24


class Display(logging.Handler):
    """Shows progress and log lines on a stream, a terminal or a file; shows nothing if quiet."""

    def __init__(self, stream: TextIO, clock: Clock, *, is_quiet: bool = False) -> None:
        super().__init__()
        self._stream = stream
        self._clock = clock
        self._is_quiet = is_quiet
        self._is_terminal = stream.isatty()
        self._shown_s = clock.monotonic_s()

    def progress(self, progress: Progress) -> None:
        """Report a finished stage of a job."""
        rows = f", {progress.rows:,} rows" if progress.rows else ""
        self.over("")
        self._line(f"{progress.stage}: {progress.done:,} of {progress.total:,}{rows}")

    def tasks(self, done: int, total: int) -> None:
        """Show the progress of the current step; in a log only every `LINE_S`."""
        now_s = self._clock.monotonic_s()
        if self._is_terminal:
            filled = round(_WIDTH * done / max(total, 1))
            bar = "█" * filled + "·" * (_WIDTH - filled)
            self.over(f"{bar} {done:,} of {total:,} tasks")
        elif now_s - self._shown_s >= LINE_S:
            self._line(f"{done:,} of {total:,} tasks")

    def emit(self, record: logging.LogRecord) -> None:
        """Show a log line, such as one about an unreachable broker."""
        self.over("")
        self._line(record.getMessage())

    def _line(self, text: str) -> None:
        self._shown_s = self._clock.monotonic_s()
        if not self._is_quiet:
            at = datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC)
            click.echo(f"{at.isoformat(timespec='seconds')} {text}", file=self._stream)

    def over(self, text: str) -> None:
        """On a terminal, replace the current line by this text; in a log it would only be noise."""
        if self._is_terminal and not self._is_quiet:
            click.echo(f"\r\x1b[K{text}", file=self._stream, nl=False)


@contextmanager
def watched_tasks(
    spark: SparkSession, display: Display, *, look_s: float = LOOK_S
) -> Iterator[None]:
    """During the block, show the tasks of active stages.

    With Spark Connect these are the tasks of the query that this process waits for; streams run at the server.
    """
    from pyspark.errors import PySparkException

    try:
        tracker = spark.sparkContext.statusTracker()
    except PySparkException:
        with _watched_by_handler(spark, display):
            yield
        return
    is_over = Event()
    thread = Thread(target=_watch, args=(tracker, display, is_over, look_s), daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def _watched_by_handler(spark: SparkSession, display: Display) -> Iterator[None]:
    def show(stages: Iterable[Any], *, done: bool, **_: Any) -> None:
        if every := [] if done else list(stages):
            display.tasks(
                sum(one.num_completed_tasks for one in every), sum(one.num_tasks for one in every)
            )

    handler: Any = show  # its class is not there without the packages of Spark Connect
    spark.registerProgressHandler(handler)
    try:
        yield
    finally:
        spark.removeProgressHandler(handler)


def _watch(tracker: StatusTracker, display: Display, is_over: Event, look_s: float) -> None:
    while not is_over.wait(look_s):
        try:
            every = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        except Exception:  # the JVM is gone: the job itself will report it
            return
        stages = [one for one in every if one is not None]
        if stages:
            done = sum(one.numCompletedTasks for one in stages)
            display.tasks(done, sum(one.numTasks for one in stages))


_WRONG_CALLS: Final = (OptionError, TablesError, JavaError)
#: Exit code of a program that Ctrl-C ended, as shells report it.
INTERRUPTED: Final = 130
_LOG: Final = logging.getLogger("qmq.pipeline")
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Job:
    """One command in progress: its configuration, its session, and its output."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.config = _config(options)
        self._is_quiet = options["quiet"]
        self._display = Display(sys.stderr, SYSTEM_CLOCK, is_quiet=self._is_quiet)
        self._as_json = options["as_json"]
        self._session: SparkSession | None = None
        self._is_own = False
        self._watching = ExitStack()
        _LOG.addHandler(self._display)
        self._began_s = SYSTEM_CLOCK.monotonic_s()

    def spark(self) -> SparkSession:
        """The session, created when first asked for; such a session ends with the command."""
        if self._session is not None:
            return self._session
        from pyspark.sql import SparkSession

        from qmq_pipeline.spark.session import get_session

        is_there = SparkSession.getActiveSession() is not None
        if not is_there:
            self._display.over("starting Spark …")
        self._session, self._is_own = get_session(), not is_there
        self._watching.enter_context(watched_tasks(self._session, self._display))
        return self._session

    def close(self) -> None:
        """End the session that this command has started; any other session stays."""
        self._watching.close()
        if self._session is not None and self._is_own:
            with suppress(Exception):  # its JVM may be gone, which was already reported
                self._session.stop()
        self._session = None
        _LOG.removeHandler(self._display)

    def on_progress(self, progress: Progress) -> None:
        """Show the progress of the job."""
        self._display.progress(progress)

    def answer(self, values: Any, text: str) -> None:
        """Stop showing tasks and print the result."""
        self._watching.close()
        self._display.over("")
        if self._as_json:
            click.echo(msgspec.json.encode(values))
        else:
            click.echo(f"{text} ({SYSTEM_CLOCK.monotonic_s() - self._began_s:.1f} s)")

    def line(self, values: Any, text: str) -> None:
        """Print the result of one step of many, with its time; nothing if quiet."""
        self._display.over("")
        at = datetime.fromtimestamp(SYSTEM_CLOCK.now_ms() / 1000, UTC).isoformat(timespec="seconds")
        if self._as_json:
            click.echo(msgspec.json.encode({"at": at, "rows": dict(values)}))
        elif not self._is_quiet:
            click.echo(f"{at} {text}")


@contextmanager
def until_signalled() -> Iterator[SignalFlag]:
    """A flag that the first SIGINT or SIGTERM sets; a second signal ends the process as usual."""
    stop = SignalFlag()
    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}

    def on_signal(_: int, __: FrameType | None) -> None:
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        stop.set()

    for number in _STOP_SIGNALS:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def running_job(options: dict[str, Any]) -> Iterator[Job]:
    """Run a job; any failure becomes one line and an exit code.

    The JVM's log is kept only if that line names it.
    """
    from qmq_pipeline.spark.explain import explain
    from qmq_pipeline.spark.session import log_path

    job: Job | None = None
    is_log_named = False
    try:
        job = Job(options)
        yield job
    except (click.exceptions.Exit, click.ClickException, SystemExit):
        raise
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    except Exception as error:  # the top of a command: no caller has a clearer message
        told = explain(error, str(log_path()))
        is_log_named = str(log_path()) in str(told)
        if is_log_named:
            with log_path().open("a", encoding="utf-8") as log:
                traceback.print_exception(error, file=log)
        click.echo(f"\rError: {' '.join(str(told).split())}", err=True)
        sys.exit(_exit_code(told))
    finally:
        if job is not None:
            job.close()
        if not is_log_named:
            log_path().unlink(missing_ok=True)


def broker_of(options: dict[str, Any]) -> Place | None:
    """The broker in the options of a command, which may read from another place."""
    from qmq_pipeline.places.places import broker_place

    if not options["broker_url"]:
        return None
    known = loaded(options["config_file"]).config.broker
    return broker_place(
        options["broker_url"], options["token_file"], known, wait_s=options["wait_s"]
    )


def _exit_code(error: QmqError) -> int:
    if isinstance(error, _WRONG_CALLS):
        return WRONG_CALL
    if isinstance(error, UnreachableError):
        return UNREACHABLE
    if isinstance(error, SourceError) and type(error) is SourceError:
        return WRONG_CALL
    return exit_code_of(error)


def _config(options: dict[str, Any]) -> PipelineConfig:
    from qmq_pipeline.places.config import PipelineConfig
    from qmq_pipeline.places.options import Place

    known = loaded(options["config_file"], options["databases"])
    path, broker_url = options["path"], options["broker_url"]
    if path and broker_url:
        raise OptionError(
            option="--path",
            value="given with --broker",
            allowed="one of the two",
            remedy="Give --path to read the directory, or --broker to ask the broker.",
        )
    place = Place(path=path) if path else broker_of(options)
    return PipelineConfig(
        tables=_folder(options["tables"]),
        place=place,
        databases=known.config.databases,
        table_format=options["table_format"],
        namespace=options["namespace"],
    )


def _folder(given: str) -> str:
    """A local folder as an absolute path: workers may run in another directory."""
    return given if not given or "://" in given else str(Path(given).absolute())
