"""One worker's part of a scan: read a range of an outbox and write it as Parquet.

Each scan reads young rows until they are old enough. A row that was seen as sent and has not
changed is not written again: its newest version is already there.

A repeated piece may read other rows, because they change. So each try writes a file of its own, and
the scan commits the file in the answer that it got.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qmq_client.outbox.table import SENT
from qmq_client.settings.sections import DatabaseSection
from qmq_pipeline.rows.outbox import OPEN, STATES, batches
from qmq_pipeline.tables.columns import Numbers
from qmq_pipeline.tables.commits import RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import OUTBOX

_OPEN_NAMES: Final = pa.array([STATES[state] for state in OPEN])
#: A row equal to the last one in all of these has not changed; `row_id` finds the last one.
_LIKE: Final = tuple(
    name for name in OUTBOX.names if name not in ("database", "row_id", "scanned_at")
)


def scan_piece(
    *,
    section: dict[str, Any],
    tables: str,
    first: int,
    after: int,
    scanned_at_ms: int,
    ids: list[int],
    known: list[str],
) -> dict[str, Any]:
    """Write the rows of one range that are new or changed; facts with the ids of rows that are still open.

    `known`: files of earlier scans that may have rows of this range, oldest first.
    """
    lake = Lake(tables)
    before = KnownRows(lake, known)
    database = msgspec.convert(section, DatabaseSection)
    open_ids: list[int] = []

    def rows() -> Any:
        for batch in batches(
            database, first_id=first, next_id=after, scanned_at_ms=scanned_at_ms, ids=ids
        ):
            is_open = pc.is_in(batch["state"], _OPEN_NAMES)
            open_ids.extend(batch["row_id"].filter(is_open).to_pylist())
            yield before.without(batch)

    kind = "open" if ids else "range"
    name = f"{scanned_at_ms:020d}-{kind}-{first:020d}-{after:020d}-{uuid.uuid4().hex}"
    path = f"database={database.name}/{name}.parquet"
    file = lake.write_tallied(OUTBOX, path, rows())
    return asdict(
        RangeFacts(
            source=database.name,
            first=first,
            next=after,
            rows=file.rows,
            files=(file,),
            notes={"open_ids": open_ids, "scanned_at_ms": scanned_at_ms},
        )
    )


class KnownRows:
    """The last version of each row that earlier scans saw."""

    def __init__(self, lake: Lake, files: Sequence[str]) -> None:
        names = ("row_id", *_LIKE)
        batches = [
            batch.select(list(names))
            for path in files
            for batch in lake.read_file(OUTBOX, path, names)
        ]
        rows = pa.Table.from_batches(batches, OUTBOX.arrow(names)).combine_chunks()
        row_ids = rows["row_id"].to_numpy()
        order = np.argsort(row_ids, kind="stable")
        is_newest = np.ones(len(order), np.bool_)
        is_newest[:-1] = row_ids[order][1:] != row_ids[order][:-1]
        self._row_ids: Numbers = row_ids[order][is_newest]
        self._rows = rows.take(pa.array(order[is_newest]))

    def without(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows, without sent ones that have not changed."""
        if not len(self._row_ids):
            return rows
        row_ids = rows["row_id"].to_numpy()
        places = np.minimum(np.searchsorted(self._row_ids, row_ids), len(self._row_ids) - 1)
        before = self._rows.take(pa.array(places))
        is_known = pc.equal(rows["state"], STATES[SENT])
        is_known = pc.and_(is_known, pa.array(self._row_ids[places] == row_ids))
        for name in _LIKE:
            is_known = pc.and_(is_known, _are_like(rows[name], before[name].combine_chunks()))
        return rows.filter(pc.invert(is_known))


def _are_like(one: pa.Array, other: pa.Array) -> pa.Array:
    """Whether two values are equal, or both null."""
    is_null = pc.and_(pc.is_null(one), pc.is_null(other))
    return pc.or_(is_null, pc.fill_null(pc.equal(one, other), fill_value=False))
