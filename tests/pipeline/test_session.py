"""What a local session tells its JVM."""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from qmq_pipeline.spark import session
from tests.pipeline.quick import QUICK

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_the_users_options_of_the_jvm_come_behind_those_of_the_pipeline(
    spark: SparkSession,
) -> None:
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    bean = jvm.java.lang.management.ManagementFactory.getRuntimeMXBean()
    said = list(bean.getInputArguments())
    ours = said.index("-Darrow.enable_unsafe_memory_access=true")
    users = [said.index(one) for one in QUICK["spark.driver.extraJavaOptions"].split()]
    assert ours < min(users), "of two options the JVM takes the later"


def test_workers_speak_through_sockets_in_a_folder_of_this_user(spark: SparkSession) -> None:
    sockets = "spark.python.unix.domain.socket."
    assert spark.conf.get(f"{sockets}enabled") == "true"
    folder = Path(str(spark.conf.get(f"{sockets}dir")))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert spark.sparkContext.parallelize([1, 2], 2).sum() == 3
    assert any(one.is_socket() for one in folder.iterdir())


def test_a_long_name_of_the_temporary_folder_leaves_tcp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = (4, 3)
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert session._sockets(tried) == {}
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert session._sockets((4, 2)) == {}
    assert session._sockets(tried)["spark.python.unix.domain.socket.enabled"] == "true"


def test_the_folder_of_sockets_goes_with_the_process() -> None:
    program = "from qmq_pipeline.spark import session; print(session._sockets((4, 3)))"
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    told = ast.literal_eval(said.stdout)
    assert not Path(told["spark.python.unix.domain.socket.dir"]).exists()
