"""A stamp that a sender forged inside a body, for the very offset where it comes to stand."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from qmq_broker.storage.files import layout
from qmq_client.commands.root import root
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import encode_record
from qmq_pipeline.errors import DamagedRangeError
from qmq_pipeline.jobs.archive import archive
from qmq_pipeline.jobs.ingest import ingest
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.log import COMMIT_LOG
from qmq_pipeline.places.options import Place
from qmq_pipeline.places.places import open_log
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import MESSAGES
from qmq_pipeline.work.workers import LocalWorkers
from tests.pipeline.world import FORGETFUL, DataDirectory, messages, scanned

#: Cuts are looked for behind each of so many bytes.
RANGE_BYTES = 16_384
COUNT = 1500


def stored(path: Path, forged: bytes) -> DataDirectory:
    """A log with this in the middle of a body of 12,000 bytes, which stands in it behind 10,000 others."""
    directory = DataDirectory(path, FORGETFUL)
    directory.append(messages(MessageIds(1), 60), frame_records=20)
    (strange,) = messages(MessageIds(2), 1)
    body = forged.ljust(12_000, b".")
    directory.append([msgspec.structs.replace(strange, body=body)])
    directory.append(messages(MessageIds(3), COUNT), frame_records=20)
    return directory


def test_it_stops_a_job_that_is_to_begin_a_range_there_and_no_other_cuts_nor_an_archive(
    tmp_path: Path, workers: LocalWorkers
) -> None:
    filler = b"#" * 11_000
    first = stored(tmp_path / "first", filler)
    first.close()
    segment = (first.path / layout.segment_path(COMMIT_LOG, 0)).read_bytes()
    body_offset = segment.index(filler)
    assert body_offset < RANGE_BYTES < body_offset + 11_000
    offset = RANGE_BYTES + 8
    (record,) = messages(MessageIds(9), 1)
    forged = scanned([("orders", encode_record(record))], offset=offset).data
    directory = stored(tmp_path / "broker", b"#" * (offset - body_offset) + forged)

    place = Place(path=str(directory.path))
    with closing(open_log(place, COMMIT_LOG)) as log:
        assert log.frame_from(RANGE_BYTES, log.bounds()) == offset, "it is taken for a frame"
    config = PipelineConfig(tables=str(tmp_path / "cut"), place=place, partition_bytes=RANGE_BYTES)
    with pytest.raises(DamagedRangeError, match=r"at offset \d+ of commitlog"):
        ingest(workers, config)
    assert Lake(config.tables).ranges(MESSAGES) == [], "nothing false is read"
    elsewhere = replace(config, tables=str(tmp_path / "whole"), partition_bytes=65_536)
    assert ingest(workers, elsewhere).rows["messages"] == COUNT + 61
    directory.close()
    verified = CliRunner().invoke(root, ["store", "verify", str(directory.path)])
    assert verified.exit_code == 0, verified.output
    archived = archive(workers, replace(config, tables=str(tmp_path / "archive")))
    assert archived.segments >= 1
    assert archived.verified == archived.messages > 61
