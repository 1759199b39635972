"""What one worker does with one range of an outbox: read it and write Parquet.

Whoever does it again reads other rows, for they change: each try writes a file of its own, and the scan commits the
file of the answer that it got.
"""

from __future__ import annotations

import uuid
from dataclasses import asdict
from typing import Any

import msgspec

from qmq_client.settings.config import DatabaseSection
from qmq_pipeline.rows.outbox import OPEN, STATES, batches
from qmq_pipeline.tables.commits import RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import OUTBOX

_OPEN_NAMES = frozenset(STATES[state] for state in OPEN)


def scan_piece(
    *,
    section: dict[str, Any],
    tables: str,
    first: int,
    after: int,
    scanned_at_ms: int,
    ids: list[int],
    next_mark: int,
) -> dict[str, Any]:
    """Write the rows of one range; facts with the ids of rows that are still open.

    `next_mark`: from this row on the next scan reads again.
    """
    database = msgspec.convert(section, DatabaseSection)
    open_ids: list[int] = []

    def rows() -> Any:
        for batch in batches(
            database, first_id=first, next_id=after, scanned_at_ms=scanned_at_ms, ids=ids
        ):
            pairs = zip(batch["row_id"].to_pylist(), batch["state"].to_pylist(), strict=True)
            open_ids.extend(row_id for row_id, state in pairs if state in _OPEN_NAMES)
            yield batch

    kind = "open" if ids else "range"
    name = f"{scanned_at_ms:020d}-{kind}-{first:020d}-{after:020d}-{uuid.uuid4().hex}"
    path = f"database={database.name}/{name}.parquet"
    file = Lake(tables).write_tallied(OUTBOX, path, rows(), mark=next_mark)
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
