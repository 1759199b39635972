"""The table `actions` of the format `qmq`: subjects and times choose its rows, as they do those of messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from qmq_client.group.actions import Acked, Paused
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.places.options import parse_log_options
from qmq_pipeline.sources.log_batches import batch_reader
from tests.pipeline.world import FORGETFUL, START_MS, DataDirectory, messages

LATER_MS = START_MS + 60_000


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[DataDirectory]:
    made = DataDirectory(tmp_path / "broker", FORGETFUL)
    made.append(messages(MessageIds(1), 1_500), at_ms=START_MS, frame_records=20)
    for at_ms in (START_MS, LATER_MS):
        made.clock.wall_ms = at_ms
        orders = Acked(at_ms, "orders", "billing", "one", 0, 1)
        # In one frame; the second was decided a moment before it was written.
        made.act([orders, Paused(at_ms - 5, "payments", "billing", is_paused=True)])
    yield made
    made.close()


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ({}, [(0, "acked"), (1, "paused"), (0, "acked"), (1, "paused")]),
        ({"subject": "orders"}, [(0, "acked"), (0, "acked")]),
        ({"subject": "payments"}, [(1, "paused"), (1, "paused")]),
        ({"until": str(LATER_MS)}, [(0, "acked"), (1, "paused"), (1, "paused")]),
        ({"since": str(LATER_MS)}, [(0, "acked")]),
        ({"since": str(LATER_MS), "until": str(LATER_MS)}, []),
    ],
)
def test_subjects_and_times_choose_actions(
    directory: DataDirectory, chosen: dict[str, str], found: list[tuple[int, str]]
) -> None:
    options = {
        "path": str(directory.path),
        "table": "actions",
        "columns": "action_number,action",
        **chosen,
    }
    reader = batch_reader(parse_log_options(options))
    rows = [
        (row["action_number"], row["action"])
        for part in reader.partitions()
        for batch in reader.read(part)
        if isinstance(batch, pa.RecordBatch)
        for row in batch.to_pylist()
    ]
    assert rows == found
