"""The jobs in a session of Spark Connect, as `SPARK_REMOTE` gives it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qmq_client.wire.message_id import MessageIds
from tests.pipeline.connect import connect_environment
from tests.pipeline.world import DataDirectory, messages

PROGRAM = """if True:
    import sys
    from qmq_client.clock import SYSTEM_CLOCK
    from qmq_pipeline.command import Display, watched_tasks
    from qmq_pipeline.jobs.run import run
    from qmq_pipeline.places.config import PipelineConfig
    from qmq_pipeline.places.options import Place
    from qmq_pipeline.spark.session import get_session

    spark = get_session()
    path, tables, page = sys.argv[1:]
    told = []

    class Noting(Display):
        def tasks(self, done, total):
            told.append((done, total))

    with watched_tasks(spark, Noting(sys.stderr, SYSTEM_CLOCK)):
        done = run(spark, PipelineConfig(tables=tables, place=Place(path=path)), report_path=page)
    assert told and all(0 <= done <= total for done, total in told), told
    print(type(spark).__module__, done.ingested.rows["messages"], done.lifecycle.lifecycle)
    spark.stop()
"""

pytestmark = [pytest.mark.timeout(1800), pytest.mark.xdist_group("spark")]


def test_all_jobs_run_where_spark_is_somewhere_else(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if not request.config.getoption("--release"):
        pytest.skip("installs what Spark Connect needs and starts a server; --release does")
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 300))
    directory.close()
    environment = connect_environment(tmp_path / "packages", (4, 0))
    page = tmp_path / "report.html"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, directory.path, tmp_path / "tables", page],
        env={**environment, "SPARK_REMOTE": "local[2]"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["pyspark.sql.connect.session", "300", "300"]
    assert page.stat().st_size > 0
