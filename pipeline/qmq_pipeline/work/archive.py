"""One worker's part of an archive: write one sealed segment as Parquet, read it back, and verify it.

The proof: there are as many rows as records, and every row, encoded again as its producer would,
has the producer's checksum. Only bytes that never were a record cannot be encoded again; they are
stored as they are, and their number is noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Final

import pyarrow as pa

from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_client.wire.record import BodyKind, Record, encode_record, record_crc
from qmq_pipeline.errors import DamagedRangeError
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.commits import ALTERED, ARCHIVED, RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import MESSAGES, SCHEDULED, TABLES
from qmq_pipeline.tables.table import Table
from qmq_pipeline.work.ranges import ingest_range

_COLUMNS: Final = (
    "subject",
    "message_id",
    "record_crc",
    "key",
    "tags",
    "headers",
    "body_kind",
    "born_at",
    "due_at",
    "expires_at",
    "body",
)
_TIMES: Final = frozenset({"born_at", "due_at", "expires_at"})


def archive_piece(
    place: dict[str, Any], folder: str, log: str, first: int, after: int
) -> dict[str, Any]:
    """Archive one segment; facts for each table, with the numbers of the verification in their notes."""
    lake = Lake(folder)
    facts = ingest_range(Place(**place), folder, log, LogRange(first, after))
    altered = [row for one in facts.values() for row in one.notes.get(ALTERED, ())]
    for name, one in facts.items():
        has_records = TABLES[name] in (MESSAGES, SCHEDULED)
        notes = verify_archived(lake, TABLES[name], one, altered) if has_records else {}
        facts[name] = replace(one, notes={**one.notes, ARCHIVED: True, **notes})
    return {name: asdict(one) for name, one in facts.items()}


def verify_archived(
    lake: Lake, table: Table, facts: RangeFacts, altered: Iterable[Mapping[str, Any]] = ()
) -> dict[str, int]:
    """Read back what was written; raises `DamagedRangeError` if it is not the segment.

    `altered`: records that did not have their producer's checksum when they were read from the log.
    """
    in_log = {str(one["message_id"]): one for one in altered}
    rows = strange = 0
    for file in facts.files:
        for row in _rows(lake, table, file.path):
            rows += 1
            if row["body_kind"] < 0:
                strange += 1
            elif _crc(row) != row["record_crc"] and row["message_id"] in in_log:
                raise _altered_in_log(facts, in_log[row["message_id"]])
            elif _crc(row) != row["record_crc"]:
                raise _not_the_same(lake, file.path, f"message {row['message_id']} differs")
    if rows != facts.rows:
        raise _not_the_same(lake, table.name, f"{rows} rows for {facts.rows} records")
    return {"verified": rows, "not_records": strange}


def _rows(lake: Lake, table: Table, path: str) -> Iterator[dict[str, Any]]:
    for batch in lake.read_file(table, path, _COLUMNS):
        columns = [
            column.cast("int64") if name in _TIMES else column
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        ]
        yield from pa.RecordBatch.from_arrays(columns, names=batch.schema.names).to_pylist()


def _crc(row: dict[str, Any]) -> int:
    record = Record(
        message_id=bytes.fromhex(row["message_id"]),
        subject=row["subject"],
        body=row["body"],
        body_kind=BodyKind(row["body_kind"]),
        key=row["key"],
        tags=tuple(row["tags"]),
        headers=tuple(row["headers"]),
        born_at_ms=row["born_at"] // 1000,
        due_at_ms=None if row["due_at"] is None else row["due_at"] // 1000,
        expires_at_ms=None if row["expires_at"] is None else row["expires_at"] // 1000,
    )
    return record_crc(encode_record(record))


def _altered_in_log(facts: RangeFacts, altered: Mapping[str, Any]) -> DamagedRangeError:
    """Such a row cannot be verified: only its producer knows what it should have been."""
    return DamagedRangeError(
        source=f"log of {facts.source}, offsets {facts.first} to {facts.next}",
        reason=f"message {altered['message_id']} of {altered['subject']} has bytes with the checksum "
        f"{altered['found_crc']:08x}, and its producer's is {altered['record_crc']:08x}. The frame around "
        "it is sound, so no disk changed it: it came to the broker like that",
        remedy="The segment stays in the log. `qmq pipeline audit` names each "
        "such message; look for what stands between its producer and the broker",
    )


def _not_the_same(lake: Lake, path: str, reason: str) -> DamagedRangeError:
    return DamagedRangeError(
        source=f"{lake.root}/{path}",
        reason=f"what was archived is not what the log holds: {reason}",
        remedy="The segment stays in the log; check the disk of the archive, and try again",
    )
