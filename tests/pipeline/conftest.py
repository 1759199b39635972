"""One Spark for all tests of the pipeline: starting it costs more than most of them.

One worker of xdist runs them all, see `tests/conftest.py`, so one JVM is started.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.pipeline.quick import QUICK

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever asks for Spark has time for its start."""
    for item in items:
        if _HERE in item.path.parents and "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(600))


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
