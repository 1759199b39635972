"""An environment for programs that use Spark Connect, which wants packages that the pipeline does not."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement


def connect_environment(folder: Path, spark: tuple[int, int]) -> dict[str, str]:
    """The environment of a process that may use it, with a Java for this Spark; installs into `folder`."""
    from qmq_pipeline.spark.session import cache_folder, find_java

    paths = [str(_installed(folder)), *sys.path]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "JAVA_HOME": find_java(os.environ, spark, cache_folder(os.environ)).home,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def _installed(folder: Path) -> Path:
    """What `pyspark[pipelines]` brings and this environment lacks, in a folder of its own."""
    wanted = [Requirement(text) for text in requires("pyspark") or ()]
    extra = [one for one in wanted if one.marker and one.marker.evaluate({"extra": "pipelines"})]
    names = {"grpcio": "grpc", "pyyaml": "yaml", "googleapis-common-protos": "google.api"}
    lacking = [
        f"{one.name}{one.specifier}"
        for one in extra
        if find_spec(names.get(one.name, one.name.replace("-", "_")).partition(".")[0]) is None
    ]
    folder.mkdir()
    if lacking:
        line = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        subprocess.run([*line, *lacking, "pandas<3"], check=True)
    return folder
