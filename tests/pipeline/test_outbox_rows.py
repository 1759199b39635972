"""Columns of outbox rows, made of many heads of records at once."""

from __future__ import annotations

from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import DUE_BYTES, RECORD_FIXED_BYTES, Record, encode_record, record_crc
from qmq_pipeline.rows.outbox import head_columns
from tests.pipeline.world import FAR_MS, START_MS

HEAD_BYTES = RECORD_FIXED_BYTES + DUE_BYTES


def test_checksum_and_due_time_are_those_of_the_records_and_null_for_what_is_none() -> None:
    ids = MessageIds(3)
    dues = [None, START_MS, None, FAR_MS, START_MS + 1]
    records = [
        encode_record(
            Record(
                message_id=ids.next_id(), subject="orders", body=b"", born_at_ms=1, due_at_ms=due
            )
        )
        for due in dues
    ]
    strange = [b"", b"no record", bytes(RECORD_FIXED_BYTES - 1)]
    heads = [record[:HEAD_BYTES] for record in records]
    crcs, due_at = head_columns([*strange, *heads, strange[2]])
    assert crcs.to_pylist() == [None] * 3 + [record_crc(one) for one in records] + [None]
    found = [None if at is None else round(at.timestamp() * 1000) for at in due_at.to_pylist()]
    assert found == [None] * 3 + dues + [None]
    assert [len(one) for one in head_columns([])] == [0, 0]
