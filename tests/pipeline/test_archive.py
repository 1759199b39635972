"""An archive has every sealed segment, each row verified, and retention waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.errors import DamagedRangeError, TablesError
from qmq_pipeline.jobs.archive import NO_BROKER, archive
from qmq_pipeline.jobs.ingest import ARCHIVE, INGEST, ingest
from qmq_pipeline.jobs.keeping import Keeping
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.schemas import MESSAGES
from qmq_pipeline.tables.store import Tables
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S
from tests.pipeline.rows import rows_of
from tests.pipeline.world import FORGETFUL, DataDirectory, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SEGMENT = FORGETFUL.segment_bytes
#: Nothing is old enough to go, or everything is.
FOREVER = ("--retain-hours", "800000", "--reserve-bytes", "0")
AT_ONCE = ("--retain-hours", "1", "--reserve-bytes", "0")


@pytest.fixture
def data(tmp_path: Path) -> DataDirectory:
    """Some sealed segments of old messages that no group consumes, and one that is not."""
    made = DataDirectory(tmp_path / "broker", FORGETFUL)
    made.append(messages(MessageIds(1), 3000, subjects=("orders",)), frame_records=20)
    assert made.store.durable_offset > 3 * SEGMENT
    made.close()
    return made


def keepers(broker: BrokerProcess) -> list[dict[str, Any]]:
    answer = httpx.get(f"{broker.url}/v1/keepers", timeout=DEADLINE_S)
    found: list[dict[str, Any]] = answer.json()["keepers"]
    return found


def test_B12_retention_waits_for_the_archive_and_goes_as_far_as_it_has_come(
    spark: SparkSession, data: DataDirectory, tmp_path: Path
) -> None:
    folder = str(tmp_path / "archive")
    with BrokerProcess(data.path, *FOREVER) as broker:
        config = PipelineConfig(tables=folder, place=Place(broker_url=broker.url))
        done = archive(spark, config)
        sealed = done.next_offsets["commitlog"]
        assert (done.keeper, done.not_waited_for) == ("archive", "")
        assert done.verified == done.messages == len(rows_of(folder, MESSAGES)) > 1000
        assert sealed % SEGMENT == 0
        (keeper,) = keepers(broker)
        assert (keeper["kept_offset"], keeper["lost_bytes"]) == (sealed, 0)
        here = PipelineConfig(tables=folder, place=Place(path=str(data.path)))
        again = archive(spark, here)
        assert again.messages == 0, "nothing new is sealed"
        assert (again.keeper, again.not_waited_for) == (None, NO_BROKER)
    with BrokerProcess(data.path, *AT_ONCE) as broker:
        broker.wait_for("segments given up: ")
        (keeper,) = keepers(broker)
        assert keeper["lost_bytes"] == 0


def test_a_row_that_is_not_what_its_producer_made_stops_an_archive_before_a_broker_hears_of_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    directory = DataDirectory(tmp_path / "broker", FORGETFUL)
    every = messages(MessageIds(1), 2000, subjects=("orders",))
    directory.spoilt = {every[17].message_id}
    directory.append(every, frame_records=20)
    directory.close()
    told: list[dict[str, int]] = []

    class Watched(Keeping):
        def report(self, store_id: str, kept: Any) -> bool:
            told.append(dict(kept))
            return True

    config = PipelineConfig(tables=str(tmp_path / "a"), place=Place(path=str(directory.path)))
    with pytest.raises(DamagedRangeError, match=every[17].message_id.hex()):
        archive(spark, config, keeping=Watched(place=None))
    assert told == [{}]


def test_an_archive_and_ingested_tables_are_kept_apart(
    spark: SparkSession, data: DataDirectory, tmp_path: Path
) -> None:
    config = PipelineConfig(tables=str(tmp_path / "a"), place=Place(path=str(data.path)))
    tables = Tables(spark, config.tables)
    for other, job in ((ARCHIVE, ingest), (INGEST, archive)):
        tables.note_progress(other, {"commitlog": 1})
        with pytest.raises(TablesError, match="a separate folder"):
            job(spark, config)
        tables.note_progress(other, {})
