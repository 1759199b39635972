"""What all commands of the pipeline share: options, the session, progress, and how errors are reported."""

from __future__ import annotations

import math
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import msgspec

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.commands.exit_codes import UNREACHABLE, WRONG_CALL, exit_code_of
from qmq_client.commands.settings import config_option, json_option, loaded
from qmq_client.signal_flag import SignalFlag
from qmq_client.wire.errors import QmqError
from qmq_pipeline.display import Display
from qmq_pipeline.errors import JavaError, LakeError, OptionError, SourceError, UnreachableError
from qmq_pipeline.places.outage import WAIT_S, WAIT_S_MAX
from qmq_pipeline.places.outage_notices import NOTICES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from qmq_pipeline.jobs.progress import Progress
    from qmq_pipeline.places.config import PipelineConfig
    from qmq_pipeline.places.options import Place
    from qmq_pipeline.sources.tasks import Workers
    from qmq_pipeline.work.workers import LocalWorkers

_Function = TypeVar("_Function", bound=Callable[..., Any])
_WRONG_CALLS: Final = (OptionError, LakeError, JavaError)
#: Exit code of a program that Ctrl-C ended, as shells report it.
INTERRUPTED: Final = 130
_SECONDS_MAX: Final = 100 * 365 * 86_400.0
#: One of them says where the logs are.
LOG_OPTIONS: Final = ("--path", "--broker")
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Seconds(click.FloatRange):
    """A span of time: a number between a given minimum and a maximum, by default a hundred years."""

    name = "seconds"

    def __init__(self, least_s: float, most_s: float = _SECONDS_MAX) -> None:
        super().__init__(least_s, most_s)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Raises click's error for a wrong call; click itself takes "nan" to be within any range."""
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail("not a number of seconds.", param, ctx)
        return seconds


class DependentOption(click.Option):
    """An option that has an effect only beside another one: without it, it is refused, not ignored."""

    def __init__(self, *declared: Any, needs: tuple[str, ...], **named: Any) -> None:
        """`needs`: one of these must be given, like `--path` or, with its value, `--as iceberg`."""
        super().__init__(*declared, **named)
        self._needs = needs

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        """Raises click's error for a wrong call. `opts` has what the command line gives, no defaults."""
        if self.name in opts and not any(_is_given(one, ctx, opts) for one in self._needs):
            raise click.UsageError(f"{self.opts[0]} needs {' or '.join(self._needs)}", ctx)
        return super().handle_parse_result(ctx, opts, args)


def _is_given(wanted: str, context: click.Context, given: Mapping[str, Any]) -> bool:
    option, _, value = wanted.partition(" ")
    names = (one.name for one in context.command.params if option in one.opts)
    return any(name in given and value in ("", given[name]) for name in names)


def job_options(function: _Function) -> _Function:
    """Options that every job has, so that one set of them fits all jobs."""
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
                "--broker", "broker_url", metavar="URL", help="Read from a running broker."
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
            click.option("--since", metavar="TIME", help="Judge what was committed from then on."),
            click.option("--until", metavar="TIME", help="Judge what was committed before."),
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


def expose_options(format_option: str) -> Callable[[_Function], _Function]:
    """Where tables are exposed in the format that `format_option` names."""
    of_iceberg: dict[str, Any] = {"cls": DependentOption, "needs": (f"{format_option} iceberg",)}

    def add(function: _Function) -> _Function:
        function = click.option(
            "--namespace",
            default="qmq",
            show_default=True,
            help="For Iceberg: the namespace in the catalog.",
            **of_iceberg,
        )(function)
        return click.option(
            "--catalog",
            default="",
            metavar="NAME",
            help="For Iceberg: a catalog from pyiceberg's configuration; its default one if not given.",
            **of_iceberg,
        )(function)

    return add


def skip_option(function: _Function) -> _Function:
    """For jobs that read logs into tables."""
    return click.option(
        "--skip-expired",
        cls=DependentOption,
        needs=LOG_OPTIONS,
        is_flag=True,
        help="Continue behind what retention has deleted.",
    )(function)


def full_option(function: _Function) -> _Function:
    """For jobs that derive tables from others."""
    text = "Rebuild the tables completely, not only what has changed."
    return click.option("--full", "is_full", is_flag=True, help=text)(function)


class Job:
    """One command in progress: its configuration, its session, and its output."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.config = _config(options)
        self._is_quiet = options["quiet"]
        self._display = Display(sys.stderr, SYSTEM_CLOCK, is_quiet=self._is_quiet)
        self._as_json = options["as_json"]
        self._session: SparkSession | None = None
        self._is_own = False
        self._workers: LocalWorkers | None = None
        self._own = ExitStack()
        self._watching = ExitStack()
        self._telling = ExitStack()
        self._telling.enter_context(NOTICES.told_to(self._display.outage))
        self._began_s = SYSTEM_CLOCK.monotonic_s()

    def spark(self) -> SparkSession:
        """The session, created when first asked for; such a session ends with the command."""
        if self._session is not None:
            return self._session
        from pyspark.sql import SparkSession

        from qmq_pipeline.spark.session import get_session
        from qmq_pipeline.spark.task_watch import watched_tasks

        is_there = SparkSession.getActiveSession() is not None
        if not is_there:
            self._display.over("starting Spark …")
        self._session, self._is_own = get_session(), not is_there
        self._own.close()  # what processes of our own did executors do from now on
        self._watching.enter_context(watched_tasks(self._session, self._display.tasks))
        return self._session

    def workers(self) -> Workers:
        """Who does work that needs no query: processes of this machine, which end with the command.

        If a session exists, or somebody else decides where Spark runs: its executors.
        """
        from qmq_pipeline.spark.session import has_session, is_submitted

        if self._session is not None or has_session() or is_submitted():
            return self.spark()
        if self._workers is None:
            from qmq_pipeline.work.workers import LocalWorkers

            self._workers = LocalWorkers(on_tasks=self._display.tasks)
            self._own.callback(self._workers.close)
        return self._workers

    def close(self) -> None:
        """End the session and the processes that this command has started; any other session stays."""
        self._watching.close()
        self._own.close()
        if self._session is not None and self._is_own:
            with suppress(Exception):  # its JVM may be gone, which was told
                self._session.stop()
        self._session = None
        self._telling.close()

    def on_progress(self, progress: Progress) -> None:
        """Show how far the job is."""
        self._display.progress(progress)

    def answer(self, values: Any, text: str) -> None:
        """Print the result; tasks are no longer shown."""
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
    except Exception as error:  # the outermost place of a command: nothing above would be clearer
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
    """The broker that the options of a command name, whatever place it reads from."""
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
            value="given beside --broker",
            allowed="one of both",
            remedy="Read the directory, or ask the broker.",
        )
    place = Place(path=path) if path else broker_of(options)
    return PipelineConfig(
        tables=_folder(options["tables"]), place=place, databases=known.config.databases
    )


def _folder(given: str) -> str:
    """A local folder as an absolute path: workers may run in another directory."""
    return given if not given or "://" in given else str(Path(given).absolute())
