"""Starts Spark so that a command on a laptop is quick and quiet, and uses it as it is on a cluster.

An existing session, or a master that somebody set (`spark-submit`), is used and changed only as far
as the sources need. Otherwise a local session is started: no UI, few shuffle partitions, all
addresses on this machine, times in UTC. The JVM's output goes to a log file, because a single
failing record makes it print 250 lines around the one that matters.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from qmq_client.clock import SystemClock
from qmq_pipeline.errors import JavaError
from qmq_pipeline.spark.java import cache_folder, check_user, find_java
from qmq_pipeline.spark.shared_classes import (
    SharedClasses,
    boot_id,
    jvm_arguments,
    key_of,
    shared_classes,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: For the small joins and sorts of a laptop; a cluster sets its own.
SHUFFLE_PARTITIONS: Final = 8
_LOCAL: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.shuffle.partitions": str(SHUFFLE_PARTITIONS),
    "spark.sql.session.timeZone": "UTC",
    "spark.log.level": "ERROR",
}
#: A start calls some hundred methods five thousand times each. At that count the JVM would
#: recompile them with its slow compiler, for a fifth of a start's processor time. Methods that work
#: on rows are called a million times, and reach that compiler only a moment later. Long loops are
#: compiled regardless of the number of calls.
_COMPILED_LATE: Final = (
    "-XX:Tier4InvocationThreshold=80000",
    "-XX:Tier4MinInvocationThreshold=9600",
    "-XX:Tier4CompileThreshold=240000",
    "-XX:Tier4BackEdgeThreshold=160000",
)
#: Arrow checks the bounds of each field of each row that a worker sends, for a tenth of a scan's
#: time, although Arrow itself wrote them.
_BOUNDS_UNCHECKED: Final = "-Darrow.enable_unsafe_memory_access=true"
#: Workers and the JVM talk through Unix sockets: TCP takes a quarter longer for a scan. Tried from
#: this version on.
_SOCKETS_IN: Final = (4, 3)
#: A socket's path has at most 107 bytes, and its name 42.
_SOCKET_FOLDER_BYTES_MAX: Final = 60
#: How a query stores its progress on disk: by renames in the JVM, where the default starts a
#: program for each small file. Both check for the name first and then rename. The class's package
#: depends on the version of Spark.
_CHECKPOINTS: Final = "spark.sql.streaming.checkpointFileManagerClass"
_MANAGER: Final = "org.apache.spark.sql.execution.streaming.{}FileSystemBasedCheckpointFileManager"
_MANAGER_MOVED_IN: Final = (4, 1)
#: These repeat an exception's text as JSON with the JVM's stack.
_LOUD_LOGGERS: Final = ("py4j", "SQLQueryContextLogger", "DataFrameQueryContextLogger")
#: Files of the JVM's output stay so long after their process: an error may have named them.
_LOG_KEPT_MS: Final = 7 * 86_400_000
#: Settings that our sources and jobs need in any session.
_NEEDED: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Spark's own type of times in Parquet has no statistics, and readers of Iceberg refuse it.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # So many folders of a table are written at once; with more, rows would be sorted by folder first.
    "spark.sql.maxConcurrentOutputFileWriters": "32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Options of a local session."""

    app_name: str = "qmq"
    #: Cores, in Spark's notation.
    master: str = "local[*]"
    driver_memory: str = "2g"
    #: The log file of the JVM; None for one in the temporary folder.
    log_file: Path | None = None
    #: Further settings of Spark; they win.
    settings: Mapping[str, str] = field(default_factory=dict)


def get_session(options: SessionOptions | None = None) -> SparkSession:
    """The session of this process, or a new one, with the sources registered.

    Raises `JavaError` if a local one must be started and there is no Java for it.
    """
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is None:
        session = _start(options or SessionOptions())
    for name, value in _NEEDED.items():
        session.conf.set(name, value)
    from qmq_pipeline.sources.register import register

    register(session)
    return session


def _start(options: SessionOptions) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.Builder().appName(options.app_name)
    classes = SharedClasses()
    arguments: tuple[str, ...] = ()
    if not is_submitted():
        check_user(os.getuid())
        version = _spark_version()
        settings = {
            **_LOCAL,
            _CHECKPOINTS: _MANAGER.format("checkpointing." if version >= _MANAGER_MOVED_IN else ""),
            "spark.driver.memory": options.driver_memory,
            **options.settings,
        }
        classes = _prepare(os.environ, version, settings)
        arguments = (*_COMPILED_LATE, _BOUNDS_UNCHECKED, *classes.arguments)
        settings = {**_sockets(version), **settings}
        builder = builder.master(options.master)
    else:
        settings = dict(options.settings)
    for name, value in settings.items():
        builder = builder.config(name, value)
    log_file = options.log_file or log_path()
    remove_old_logs(SystemClock().now_ms())
    try:
        session = _started(builder, arguments, classes.file, log_file)
    except Exception as error:  # the gateway raises whatever the launcher said
        raise JavaError(
            f"Spark did not start: {_first_line(error)}. Java's output is in {log_file}."
        ) from error
    quieten()
    if classes.is_made:
        atexit.register(_close_jvm_output, session)
    return session


def _started(
    builder: SparkSession.Builder, arguments: Sequence[str], classes: Path | None, log_file: Path
) -> SparkSession:
    """The session. If a JVM does not start with its file of classes, it is started without."""
    try:
        with _jvm_stderr_to(log_file), jvm_arguments(arguments, os.environ):
            return builder.getOrCreate()
    except Exception:  # whatever it was: what is wrong without the file, too, is raised below
        if classes is None:
            raise
        classes.unlink(missing_ok=True)
    with _jvm_stderr_to(log_file):
        return builder.getOrCreate()


def log_path() -> Path:
    """The JVM's log file if none is given."""
    return Path(tempfile.gettempdir()) / f"qmq-spark-{os.getuid()}-{os.getpid()}.log"


def remove_old_logs(now_ms: int) -> None:
    """Remove the log files of this user's processes that ended a week ago: who is killed removes none."""
    folder, _, own_name = str(log_path()).rpartition("/")
    start = own_name.removesuffix(f"{os.getpid()}.log")
    for name in os.listdir(folder):
        process = name.removeprefix(start).removesuffix(".log")
        if not (name == f"{start}{process}.log" and process.isdecimal()):
            continue
        with contextlib.suppress(OSError):  # another process removes it, or it is not ours
            found = os.lstat(f"{folder}/{name}")
            is_old = found.st_mtime * 1000 < now_ms - _LOG_KEPT_MS
            if is_old and found.st_uid == os.getuid() and not _is_running(int(process)):
                os.unlink(f"{folder}/{name}")


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # the number is another user's by now
        return True
    return True


def quieten() -> None:
    """Let nobody but us tell that something failed in the JVM, or on the way to it."""
    for name in _LOUD_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_is_not_of_bridge)


def _is_not_of_bridge(record: logging.LogRecord) -> bool:
    """The bridge writes the traceback of a broken line to the root logger, and raises an error as well."""
    return Path(record.pathname).parent.name != "py4j"


def is_submitted() -> bool:
    """Whether somebody else decides where Spark runs."""
    given = ("MASTER", "SPARK_REMOTE", "PYSPARK_GATEWAY_PORT")
    return any(os.environ.get(name) for name in given)


def _spark_version() -> tuple[int, int]:
    from pyspark import __version__

    major, minor = (int(part) for part in __version__.split(".")[:2])
    return major, minor


def _prepare(
    environment: os._Environ[str], version: tuple[int, int], settings: Mapping[str, str]
) -> SharedClasses:
    """Set what a local session needs in the environment; the arguments about shared classes for its JVM."""
    from pyspark.find_spark_home import _find_spark_home

    cache = cache_folder(environment)
    java = find_java(environment, version, cache)
    environment["JAVA_HOME"] = java.home
    # Otherwise workers would run another Python, without this one's packages.
    environment["PYSPARK_PYTHON"] = environment["PYSPARK_DRIVER_PYTHON"] = sys.executable
    environment.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    key = key_of(Path(java.home), Path(_find_spark_home()) / "jars", settings, environment)
    return shared_classes(cache / "classes", key, SystemClock().now_ms(), boot_id())


def _sockets(version: tuple[int, int]) -> dict[str, str]:
    """Settings that let workers and the JVM talk through sockets in a private folder, removed at exit.

    Empty if Spark is too old for it, or the temporary folder's name too long.
    """
    if version < _SOCKETS_IN:
        return {}
    folder = tempfile.mkdtemp(prefix="qmq-")
    atexit.register(_remove, folder, os.getpid())
    if len(os.fsencode(folder)) > _SOCKET_FOLDER_BYTES_MAX:
        return {}
    sockets = "spark.python.unix.domain.socket."
    return {f"{sockets}enabled": "true", f"{sockets}dir": folder}


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # a fork that ends leaves it to its parent
        shutil.rmtree(folder, ignore_errors=True)


def _close_jvm_output(session: SparkSession) -> None:
    """Close the JVM's output: it works on for some seconds, and a reader of our output must not wait for it."""
    jvm = session.sparkContext._jvm
    if jvm is not None:
        with contextlib.suppress(Exception):  # it may be gone
            jvm.java.lang.System.out.close()


@contextlib.contextmanager
def _jvm_stderr_to(log_file: Path) -> Iterator[None]:
    """Make `log_file` the standard error of a child started within the block, for the child's whole life."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    kept = os.dup(2)
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.dup2(log, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(log)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
