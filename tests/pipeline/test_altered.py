"""P4: bytes that are not those their producer made a checksum of are noted when they are read from the log."""

from __future__ import annotations

import msgspec

from qmq_client.wire.checksum import crc32c
from qmq_client.wire.frame import FrameKind
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import MESSAGE_ID_POSITION, Record, encode_record
from qmq_pipeline.rows.decode import Selection
from qmq_pipeline.rows.log_rows import log_batches
from qmq_pipeline.tables.schemas import LOG
from tests.pipeline.world import FAR_MS, messages, scanned, spoilt

COLUMNS = ("kind", "subject", "message_id", "sequence", "found_crc")


def found_crc(record: Record) -> int:
    content = spoilt(encode_record(record))[MESSAGE_ID_POSITION:]
    return crc32c(content, crc32c(record.subject.encode()))


def test_P4_records_whose_bytes_do_not_fit_their_checksum_are_reported_by_name() -> None:
    every = messages(MessageIds(1), 40, subjects=("orders", "flight.departed"))
    altered = {every[number].message_id.hex(): every[number] for number in (3, 17, 28)}
    due = [msgspec.structs.replace(one, due_at_ms=FAR_MS) for one in messages(MessageIds(2), 3)]
    altered[due[1].message_id.hex()] = due[1]

    def encoded(record: Record) -> tuple[str, bytes]:
        data = encode_record(record)
        return record.subject, spoilt(data) if record.message_id.hex() in altered else data

    frames = [
        scanned([encoded(one) for one in every]),
        scanned([encoded(one) for one in due], kind=FrameKind.DELAYED, offset=8192),
    ]
    selection = Selection(table=LOG, columns=COLUMNS)
    rows = [row for batch in log_batches(frames, selection) for row in batch.to_pylist()]
    assert len(rows) == 43, "what is altered is a row like any other"
    told = {row["message_id"]: row["found_crc"] for row in rows if row["found_crc"] is not None}
    assert told == {name: found_crc(record) for name, record in altered.items()}
    assert [row["sequence"] for row in rows if row["kind"] == "scheduled"] == [None] * 3
