"""An archive goes on with a broker that was restored from a backup, as far as its log is the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from qmq_broker.storage.files.disk import OsDisk, link_file
from qmq_broker.storage.keepers import LogOffsets
from qmq_broker.storage.logs.actions import Acked
from qmq_broker.storage.upkeep.backup import back_up
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.jobs.archive import archive
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import ACTIONS, MESSAGES
from qmq_pipeline.work.workers import LocalWorkers
from tests.pipeline.world import FORGETFUL, START_MS, DataDirectory, messages

_OPTIONS = replace(FORGETFUL, action_segment_bytes=4096)
_KEEPER = "archive"


def _run(place: Path, folder: Path) -> dict[str, int]:
    config = PipelineConfig(tables=str(folder), place=Place(path=str(place)))
    with LocalWorkers(1) as workers:
        return archive(workers, config).next_offsets


def _acked(directory: DataDirectory) -> None:
    for number in range(200):
        directory.act([Acked(START_MS, "orders", "billing", "one", number, number + 1)])


def test_X3_B12_an_archive_of_a_restored_broker_has_no_gap(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "broker", _OPTIONS)
    store, folder = directory.store, tmp_path / "archive"
    directory.append(messages(MessageIds(1), 2000, subjects=("orders",)), frame_records=20)
    _acked(directory)
    store.keep(_KEEPER, LogOffsets(0, 0), START_MS)
    ends = _run(directory.path, folder)
    store.keep(_KEEPER, LogOffsets(ends["commitlog"], ends["actionlog"]), START_MS)
    # The archive does not run for a while; snapshots would let the actions go.
    directory.append(messages(MessageIds(2), 2000, subjects=("orders",)), frame_records=20)
    for _ in range(3):
        _acked(directory)
        store.actions.write_snapshot(store.actions.log.written_offset, b"")
    assert store.actions.first_offset == ends["actionlog"]
    source, target = OsDisk(str(directory.path)), OsDisk(str(tmp_path / "backup"))
    back_up(source, target, directory.clock, link=lambda path: link_file(source, path, target))
    directory.close()

    restored = DataDirectory(tmp_path / "backup", _OPTIONS)
    for _ in range(2):
        _acked(restored)
        restored.store.actions.write_snapshot(restored.store.actions.log.written_offset, b"")
    later = _run(restored.path, folder)
    restored.close()
    assert all(later[log] > ends[log] for log in ends)
    for table in (MESSAGES, ACTIONS):
        ranges = Lake(str(folder)).ranges(table)
        assert ranges[0].first == 0
        assert all(one.next == other.first for one, other in pairwise(ranges)), "no gap"
