"""What the pipeline's benchmarks read: a log that grows, and its outbox, are sound."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pipeline.logs import BODY_BYTES, FRAME_MESSAGES, Filling, plain_records
from benchmarks.pipeline.plain import plain_audit
from qmq_client.wire.record import decode_record, encode_record


def test_a_log_that_was_filled_twice_has_every_message_of_its_outbox_once(tmp_path: Path) -> None:
    filling = Filling(tmp_path / "log", outbox=tmp_path / "outbox.db")
    filling.add(1_000)
    filling.add(500)
    assert filling.messages == 1_500
    found = plain_audit(tmp_path / "log", tmp_path / "outbox.db")
    assert (found.pop("committed"), found.pop("stored")) == (1_500, 1_500)
    assert not any(found.values()), found


def test_records_of_the_log_are_what_the_wire_makes_of_their_fields(tmp_path: Path) -> None:
    Filling(tmp_path / "log").add(2 * FRAME_MESSAGES)
    decoded = [
        (decode_record(name, data), data) for name, data, _ in plain_records(tmp_path / "log")
    ]
    assert all(encode_record(record) == data for record, data in decoded)
    records = [record for record, _ in decoded]
    assert len({one.message_id for one in records}) == len({one.body for one in records}) == 1_000
    assert {len(one.body) for one in records} == {BODY_BYTES}
    assert len({one.headers for one in records}) == FRAME_MESSAGES
