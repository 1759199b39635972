"""What tests of the pipeline work on: a data directory, an outbox, and one Spark for all of them.

Starting Spark costs more than most tests. One worker of xdist runs all that ask for it, see
`tests/conftest.py`, so one JVM is started.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.options import Place
from tests.kit.asking import asks_for_spark
from tests.pipeline.quick import QUICK
from tests.pipeline.world import DataDirectory, OutboxDatabase

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever asks for Spark has time for its start, and says so where `asks_for_spark` sees it."""
    for item in items:
        if _HERE in item.path.parents and "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(600))
            if not asks_for_spark(item.path):
                raise pytest.UsageError(f"{item.nodeid}: write its argument as spark: SparkSession")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[DataDirectory]:
    made = DataDirectory(tmp_path / "broker")
    yield made
    made.close()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[OutboxDatabase]:
    made = OutboxDatabase(tmp_path / "orders.db")
    yield made
    made.close()


@pytest.fixture
def config(directory: DataDirectory, tmp_path: Path) -> PipelineConfig:
    return PipelineConfig(tables=str(tmp_path / "tables"), place=Place(path=str(directory.path)))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from qmq_pipeline.spark.session import SessionOptions, get_session

    folder = tmp_path_factory.mktemp("spark")
    session = get_session(
        SessionOptions(
            master="local[2]",
            driver_memory="1g",
            log_file=folder / "jvm.log",
            settings={**QUICK, "spark.sql.warehouse.dir": str(folder / "warehouse")},
        )
    )
    yield session
    session.stop()
