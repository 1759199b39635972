"""The example of a declarative pipeline, run by `spark-pipelines` over the format as Spark finds it by itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from qmq_client.wire.message_id import MessageIds
from tests.pipeline.connect import connect_environment
from tests.pipeline.world import DataDirectory, messages

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "pipeline" / "declarative"
PAGE = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
DATA = "/var/lib/qmq"
COMMAND = "spark-pipelines run --conf spark.sql.catalogImplementation=hive"

pytestmark = [pytest.mark.timeout(1800), pytest.mark.xdist_group("spark")]


def test_the_page_tells_the_command_that_is_tried() -> None:
    assert COMMAND in PAGE


def test_each_run_appends_what_is_new_and_counts_again(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if not request.config.getoption("--release"):
        pytest.skip("installs what Spark Connect needs and starts Spark twice; --release does")
    directory = DataDirectory(tmp_path / "broker")
    folder, environment = prepared(tmp_path, directory.path)
    ids = MessageIds(1)
    for added, total in ((500, 500), (300, 800)):
        directory.append(messages(ids, added))
        done = subprocess.run(
            COMMAND.split(),
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert "Run is COMPLETED" in done.stdout + done.stderr, done.stderr[-4000:]
        rows = pq.read_table(folder / "spark-warehouse" / "messages").to_pylist()
        assert len({(row["subject"], row["sequence"]) for row in rows}) == len(rows) == total
        minutes = pq.read_table(folder / "spark-warehouse" / "flow_minute").to_pylist()
        assert sum(row["stored"] for row in minutes) == total
    directory.close()


def prepared(tmp_path: Path, data: Path) -> tuple[Path, dict[str, str]]:
    """The example with the places of this machine, and the environment that it runs in."""
    folder = tmp_path / "pipeline"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "spark-pipeline.yml"
    text = file.read_text()
    for place, here in (
        ("file:///data/pipeline", (tmp_path / "storage").as_uri()),
        (DATA, str(data)),
    ):
        assert place in text
        text = text.replace(place, here)
    file.write_text(text)
    return folder, connect_environment(tmp_path / "packages", (4, 1))
