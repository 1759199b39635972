"""Reuses the JVM's loaded classes of Spark from a file in this user's cache: half the work of a start.

A local session loads and verifies twenty thousand classes from two hundred jars. If there is no
file for this Java, this Spark and this class path, the second JVM to start writes one when it ends
(`-XX:ArchiveClassesAtExit`, from Java 13 on), and later JVMs map it into memory. At every start the
JVM itself checks the file against its build and the jars, and goes on without a file that does not
fit. So a wrong file costs time, but never gives a wrong answer.

A JVM that maps a truncated file may die. So a JVM writes a draft, named by the current boot of the
machine. The draft is accepted once its first bytes are set, which the JVM writes last, and only
within the same boot, so that no power cut can have taken a part of it; its final name contains its
length. If nothing can be written, a start takes as long as without.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: What `spark-submit` adds to its JVM's arguments; Spark's settings with the same effect stay the
#: user's.
_ARGUMENTS: Final = "SPARK_SUBMIT_OPTS"
#: Standard output belongs to the program; messages about classes that cannot be archived help nobody.
_QUIET: Final = ("-Xlog:disable", "-Xlog:all=warning:stderr", "-Xlog:cds*=off:stderr")
#: Settings and variables that put something in front of Spark's jars.
_CLASS_PATH_SETTING: Final = "spark.driver.extraClassPath"
_CLASS_PATH_VARIABLES: Final = ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_CONF_DIR")
#: Writing the file costs a start a tenth more, and some seconds at its end. So the second start
#: does it at the earliest (a container that is thrown away never does), and if it failed it is not
#: tried again at once.
_AGAIN_S: Final = 86_400
#: A file of 150 MiB that no start has used for so long is removed: its Java or its Spark is
#: probably gone.
_UNUSED_S: Final = 30 * 86_400
_SUFFIX: Final = ".jsa"
_DRAFT: Final = ".draft"
_HEAD_BYTES: Final = 4
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedClasses:
    """The JVM arguments of one session about the file."""

    arguments: tuple[str, ...] = ()
    #: The file to use.
    file: Path | None = None
    #: Whether the JVM writes the file when it ends, which takes some seconds.
    is_made: bool = False


def key_of(
    java_home: Path, jars: Path, settings: Mapping[str, str], environment: Mapping[str, str]
) -> str:
    """A key for what a file fits: one Java, one Spark, one class path."""
    parts = [os.path.realpath(java_home), os.path.realpath(jars)]
    parts += [str(_changed_ns(one)) for one in (java_home / "bin" / "java", java_home / "release")]
    parts += [str(_changed_ns(jars)), settings.get(_CLASS_PATH_SETTING, "")]
    parts += [environment.get(name, "") for name in _CLASS_PATH_VARIABLES]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def shared_classes(folder: Path, key: str, now_ms: int, boot: str) -> SharedClasses:
    """Use the file for `key` in `folder`, or have one written; neither if that is not possible."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = _whole(folder, key) or _accepted(folder, key, boot)
        _sweep(folder, found, now_ms)
        if found is not None:
            return SharedClasses(arguments=(f"-XX:SharedArchiveFile={found}", *_QUIET), file=found)
        if not _is_to_be_made(folder / f"{key}.starts", now_ms):
            return SharedClasses()
    except OSError:
        return SharedClasses()
    path = folder / f"{key}-{boot}-{secrets.token_hex(4)}{_DRAFT}"
    return SharedClasses(arguments=(f"-XX:ArchiveClassesAtExit={path}", *_QUIET), is_made=True)


def boot_id() -> str:
    """Differs after each boot of the machine; empty if the system does not tell."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def _whole(folder: Path, key: str) -> Path | None:
    every = folder.glob(f"{key}-*{_SUFFIX}")
    return next((one for one in every if one.stem == f"{key}-{one.stat().st_size}"), None)


def _accepted(folder: Path, key: str, boot: str) -> Path | None:
    """The first finished draft, synced and under its final name."""
    for draft in folder.glob(f"{key}-{boot}-*{_DRAFT}"):
        with draft.open("rb") as file:
            if not any(file.read(_HEAD_BYTES)):
                continue
            os.fsync(file.fileno())
            path = folder / f"{key}-{os.fstat(file.fileno()).st_size}{_SUFFIX}"
        draft.replace(path)
        return path
    return None


@contextlib.contextmanager
def jvm_arguments(
    arguments: Sequence[str], environment: MutableMapping[str, str]
) -> Iterator[None]:
    """Let a JVM that starts within the block have the arguments, in front of the user's own, which win."""
    known = environment.get(_ARGUMENTS)
    every = [*map(_quoted, arguments), *([known] if known else [])]
    environment[_ARGUMENTS] = " ".join(every)
    try:
        yield
    finally:
        if known is None:
            del environment[_ARGUMENTS]
        else:
            environment[_ARGUMENTS] = known


def _is_to_be_made(starts: Path, now_ms: int) -> bool:
    """Whether this folder outlives a start, and no recent start tried; notes this try."""
    if not starts.exists():
        starts.touch()
        return False
    now_s = now_ms / 1000
    noted = starts.stat()
    if noted.st_size and 0 <= now_s - noted.st_mtime < _AGAIN_S:
        return False
    starts.write_text("tried\n")
    os.utime(starts, (now_s, now_s))
    return True


def _sweep(folder: Path, used: Path | None, now_ms: int) -> None:
    """Note that a file is in use, and remove files that are unused or were never finished."""
    now_s = now_ms / 1000
    with contextlib.suppress(OSError):  # others sweep too, and some may only read
        if used is not None:
            os.utime(used, (now_s, now_s))
        for path in folder.iterdir():
            kept_s = _AGAIN_S if path.suffix == _DRAFT else _UNUSED_S
            if path != used and now_s - path.stat().st_mtime > kept_s:
                path.unlink()


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _quoted(argument: str) -> str:
    """As the launcher of Spark reads several in one text."""
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"' if " " in escaped else escaped
