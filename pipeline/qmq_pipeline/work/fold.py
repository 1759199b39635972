"""One worker's part of a fold, for the groups of one bucket: read the new actions, fold them into
what was known about each message, and write the blocks with changes.

Groups are assigned to buckets by name, so a bucket needs no other. A file holds one block of
sequences of all groups of a bucket, so that a thousand small groups do not make a thousand files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Final
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc

from qmq_client.wire.names import OWN_PREFIX
from qmq_pipeline.fold.fold import GroupFold, GroupMark
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import ACTIONS, DELIVERIES

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
#: Actions that change no message; most only show that a consumer is alive.
_IDLE: Final = pa.array(["extended", "configured", "paused", "purged"])


def group_name(subject: str, group: str) -> str:
    """One name for both; neither contains a line break."""
    return f"{subject}\n{group}"


def bucket_of(name: str, buckets: int) -> int:
    """The bucket of a group, by its `group_name`."""
    return crc32(name.encode()) % buckets


def part_name(bucket: int, block: int) -> str:
    """The part of the table `deliveries` that holds this block of this bucket."""
    return f"{bucket:05d}-{block:012d}"


def fold_piece(
    tables: str,
    run: str,
    bucket: dict[str, int],
    actions: dict[str, int],
    marks: dict[str, Any],
    files: dict[str, str],
) -> dict[str, Any]:
    """Fold the actions between two offsets; the files that were written, and the mark of each group.

    `bucket`: its number, the number of buckets, and the length of a block; `files`: block → its
    current path.
    """
    lake = Lake(tables)
    shelf = _Shelf(lake, files)
    folds: dict[str, GroupFold] = {}
    for rows in action_batches(lake, actions["first"], actions["next"]):
        for row in _of_bucket(rows, bucket["number"], bucket["of"]):
            name = group_name(row["subject"], row["consumer_group"])
            fold = folds.get(name)
            if fold is None:
                known = marks.get(name)
                fold = folds[name] = GroupFold(
                    row["subject"],
                    row["consumer_group"],
                    mark=GroupMark.from_json(known) if known else None,
                    load=partial(shelf.rows, row["subject"], row["consumer_group"]),
                    block_sequences=bucket["block_sequences"],
                )
            fold.add(row)
    written: dict[str, list[dict[str, Any]]] = {}
    for block in sorted({number for fold in folds.values() for number in fold.changed}):
        part = part_name(bucket["number"], block)
        path = f"run={run}/{part}.parquet"
        file = lake.write(DELIVERIES, path, _merged(shelf, folds, block))
        written[part] = [asdict(file)] if file.rows else []
    touched: dict[str, list[tuple[int, int]]] = {}
    for fold in folds.values():
        touched.setdefault(fold.subject, []).extend(fold.touched)
    return {
        "files": written,
        "marks": {name: fold.mark.to_json() for name, fold in folds.items()},
        "touched": touched,
    }


def action_batches(lake: Lake, first_offset: int, next_offset: int) -> Iterator[pa.RecordBatch]:
    """Committed actions between two offsets in order of the log, times as microseconds."""
    for one in lake.ranges(ACTIONS):
        # A merged range may begin before these offsets, and still hold new actions.
        is_within = first_offset <= one.first and one.next <= next_offset
        is_beside = one.next <= first_offset or next_offset <= one.first
        for file in () if is_beside else one.files:
            for batch in lake.read_file(ACTIONS, file.path, _COLUMNS):
                offsets = batch["action_offset"]
                rows = batch
                if not is_within:
                    is_old = pc.less(offsets, first_offset)
                    rows = batch.filter(pc.and_not(pc.less(offsets, next_offset), is_old))
                at = rows.schema.get_field_index("at")
                yield rows.set_column(at, "at", rows.column(at).cast(pa.int64()))


class _Shelf:
    """The blocks of a bucket as the table has them; each is read when first asked for."""

    def __init__(self, lake: Lake, files: Mapping[str, str]) -> None:
        self._lake = lake
        self._files = files
        self._tables: dict[int, pa.Table] = {}

    def table(self, block: int) -> pa.Table:
        """All groups of a block."""
        known = self._tables.get(block)
        if known is None:
            path = self._files.get(str(block))
            batches = (
                () if path is None else self._lake.read_file(DELIVERIES, path, DELIVERIES.names)
            )
            known = pa.Table.from_batches(batches, DELIVERIES.arrow())
            self._tables[block] = known
        return known

    def rows(self, subject: str, group: str, block: int) -> pa.Table:
        """One group of a block."""
        table = self.table(block)
        is_of_subject = pc.equal(table["subject"], subject)
        return table.filter(pc.and_(is_of_subject, pc.equal(table["consumer_group"], group)))


def _merged(shelf: _Shelf, folds: Mapping[str, GroupFold], block: int) -> Iterator[pa.RecordBatch]:
    """A new version of a block: the folded groups, and the unchanged ones as they were."""
    mine = {name: fold for name, fold in folds.items() if block in fold.changed}
    old = shelf.table(block)
    names = pc.binary_join_element_wise(old["subject"], old["consumer_group"], "\n")
    kept = old.filter(pc.invert(pc.is_in(names, value_set=pa.array(mine, pa.string()))))
    if kept.num_rows:
        fresh = [batch for fold in mine.values() for batch in fold.batches(block)]
        both = pa.concat_tables([kept, pa.Table.from_batches(fresh, DELIVERIES.arrow())])
        yield from both.sort_by([(name, "ascending") for name in DELIVERIES.key]).to_batches()
        return
    for name in sorted(mine):
        yield from mine[name].batches(block)


def _of_bucket(rows: pa.RecordBatch, bucket: int, buckets: int) -> Iterator[dict[str, Any]]:
    names = pc.binary_join_element_wise(rows["subject"], rows["consumer_group"], "\n")
    encoded = pc.dictionary_encode(names)
    mine = [
        # Groups on the broker's own subjects are left out, as in `rows/decode.py`.
        name is not None and not name.startswith(OWN_PREFIX) and bucket_of(name, buckets) == bucket
        for name in encoded.dictionary.to_pylist()
    ]
    is_mine = pa.array(mine, pa.bool_()).take(encoded.indices)
    is_idle = pc.is_in(rows["action"], value_set=_IDLE)
    chosen = rows.filter(pc.and_not(is_mine, is_idle))
    yield from chosen.to_pylist()
