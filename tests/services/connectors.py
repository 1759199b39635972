"""Connectors of Spark for other formats of tables: jars, with all that they need, from Maven's repository.

Spark fetches them itself, as it does for users who start it with `--packages`. They are kept below `.cache`.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from qmq_pipeline.spark.session import cache_folder, find_java
from tests.services.drivers import ROOT
from tests.services.packages import locked
from tests.services.rungs import RungError

#: `dev.py clean` removes it.
_FOLDER: Final = ROOT / ".cache" / "connectors"
_FETCH_S_MAX: Final = 600
_REASON_CHARACTERS: Final = 300
_JVM_SAYS: Final = "Exception in thread"
#: Starts the JVM of Spark, which fetches what its arguments name before it says that it is there.
_START: Final = "from pyspark.java_gateway import launch_gateway; launch_gateway()"


def connectors(
    coordinates: Sequence[str], environment: Mapping[str, str], spark: tuple[int, int]
) -> list[Path]:
    """The jars of these connectors (`group:artifact:version`) for the Spark of an environment; fetched once.

    Raises `RungError` where they cannot be had.
    """
    name = hashlib.sha256("\n".join([str(spark), *coordinates]).encode()).hexdigest()[:16]
    folder = _FOLDER / name
    with locked(_FOLDER / "lock"):
        if not folder.exists():
            _fetch(coordinates, environment, spark, folder)
    return sorted((folder / "jars").glob("*.jar"))


def _fetch(
    coordinates: Sequence[str],
    environment: Mapping[str, str],
    spark: tuple[int, int],
    folder: Path,
) -> None:
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    java = find_java(environment, spark, cache_folder(environment)).home
    words = ["--packages", ",".join(coordinates), "--conf", f"spark.jars.ivy={unfinished}"]
    submitted = {"JAVA_HOME": java, "PYSPARK_SUBMIT_ARGS": " ".join([*words, "pyspark-shell"])}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _START],
            env={**environment, **submitted},
            capture_output=True,
            text=True,
            timeout=_FETCH_S_MAX,
        )
    except subprocess.TimeoutExpired:
        raise RungError(f"{', '.join(coordinates)} took more than {_FETCH_S_MAX} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith(_JVM_SAYS)]
        said = " ".join([*lines, *done.stderr.splitlines()[-1:], "no reason was given"][0].split())
        said = said[:_REASON_CHARACTERS]
        raise RungError(f"{', '.join(coordinates)} cannot be fetched: {said}")
    unfinished.rename(folder)
