"""What one worker does for the groups of one bucket: read the actions, fold them, write what became of
each message. Groups are dealt to buckets by their names, so a bucket needs no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc

from qmq_pipeline.fold import GroupFold
from qmq_pipeline.lake import Lake, RangeFacts
from qmq_pipeline.schemas import ACTIONS, DELIVERIES

_COLUMNS: Final = [
    "action_offset",
    "action_number",
    "at",
    "action",
    "subject",
    "consumer_group",
    "consumer",
    "first_sequence",
    "next_sequence",
    "first_pull",
    "next_pull",
    "attempt",
    "reason",
    "error",
    "action_json",
]
#: Actions that change no message; most of them say that somebody is still there.
_IDLE: Final = pa.array(["extended", "configured", "paused", "purged", "ended"])


def fold_piece(tables: str, bucket: int, buckets: int, run: str) -> dict[str, Any]:
    """Write the deliveries of one bucket; facts of the file."""
    lake = Lake(tables)
    folds: dict[tuple[str, str], GroupFold] = {}
    last_offset = 0
    for rows in action_batches(lake):
        for row in _of_bucket(rows, bucket, buckets):
            key = (row["subject"], row["consumer_group"])
            fold = folds.get(key)
            if fold is None:
                fold = folds[key] = GroupFold(*key)
            fold.add(row)
            last_offset = row["action_offset"]
    batches = (batch for key in sorted(folds) for batch in folds[key].batches())
    file = lake.write(DELIVERIES, f"run={run}/{bucket:05d}.parquet", batches)
    unmatched = sum(fold.unmatched for fold in folds.values())
    return asdict(
        RangeFacts(
            source=f"bucket {bucket} of {buckets}",
            first=0,
            next=last_offset,
            rows=file.rows,
            files=(file,),
            notes={"unmatched": unmatched},
        )
    )


def action_batches(lake: Lake) -> Iterator[pa.RecordBatch]:
    """All committed actions in order of the log, times as microseconds."""
    for one in lake.ranges(ACTIONS):
        for file in one.files:
            for batch in lake.read_file(ACTIONS, file.path, _COLUMNS):
                at = batch.schema.get_field_index("at")
                yield batch.set_column(at, "at", batch.column(at).cast(pa.int64()))


def _of_bucket(rows: pa.RecordBatch, bucket: int, buckets: int) -> Iterator[dict[str, Any]]:
    names = pc.binary_join_element_wise(rows["subject"], rows["consumer_group"], "\n")
    encoded = pc.dictionary_encode(names)
    mine = [
        name is not None and crc32(name.encode()) % buckets == bucket
        for name in encoded.dictionary.to_pylist()
    ]
    is_mine = pa.array(mine, pa.bool_()).take(encoded.indices)
    is_idle = pc.is_in(rows["action"], value_set=_IDLE)
    chosen = rows.filter(pc.and_not(is_mine, is_idle))
    yield from chosen.to_pylist()
