"""Columns of outbox rows, made of many heads of records at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa
from sqlalchemy import event

from qmq_client.outbox.table import DEFAULT_TABLES
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import DUE_BYTES, RECORD_FIXED_BYTES, Record, encode_record, record_crc
from qmq_pipeline.rows.outbox import (
    ScanMark,
    first_and_next_id,
    head_columns,
    plan_scan,
    require_outbox,
)
from tests.pipeline.world import FAR_MS, START_MS, OutboxDatabase, messages

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
    crcs, due_at = head_columns(pa.array([*strange, *heads, strange[2]], pa.binary()))
    assert crcs.to_pylist() == [None] * 3 + [record_crc(one) for one in records] + [None]
    found = [None if at is None else round(at.timestamp() * 1000) for at in due_at.to_pylist()]
    assert found == [None] * 3 + dues + [None]
    assert [len(one) for one in head_columns(pa.array([], pa.binary()))] == [0, 0]


@pytest.mark.parametrize("new", [3, 9, 12], ids=["fewer", "as many", "more"])
def test_P4_a_scan_reads_all_rows_once_more_when_sqlite_may_have_given_numbers_out_again(
    tmp_path: Path, new: int
) -> None:
    """Rows that were kept for their time and are gone: what is new stands below the mark, and was sent long ago."""
    database = OutboxDatabase(tmp_path / "orders.db")

    def scan(last: ScanMark) -> ScanMark:
        return plan_scan(database.section, last, safety_ms=1_000)

    database.insert(messages(MessageIds(1), 9), created_at_ms=START_MS)
    first = scan(ScanMark())
    assert (first.first_id, first.end_id, first.next_id) == (0, 10, 10)
    again = scan(first)
    assert (again.first_id, again.end_id, again.next_id) == (10, 10, 10)
    assert again.since_ms == first.scanned_at_ms
    assert scan(ScanMark(10)).first_id == 0  # nobody has seen who stood there
    database.execute(sa.delete(DEFAULT_TABLES.outbox))
    database.insert(messages(MessageIds(2), new), created_at_ms=START_MS + 60_000)
    last = scan(first)
    assert (last.first_id, last.end_id, last.next_id) == (0, new + 1, new + 1)
    assert scan(last).first_id == new + 1
    database.close()


def test_whoever_asks_where_an_outbox_begins_and_ends_does_not_walk_through_its_rows(
    tmp_path: Path,
) -> None:
    database = OutboxDatabase(tmp_path / "orders.db")
    database.insert(messages(MessageIds(1), 5_000), created_at_ms=FAR_MS)
    section = database.section
    asks: dict[str, Callable[[], object]] = {
        "is there one": lambda: require_outbox(section),
        "its ends": lambda: first_and_next_id(section),
        "a scan of young rows": lambda: plan_scan(section, ScanMark(), safety_ms=1_000),
    }
    for name, ask in asks.items():
        with steps_of_sqlite() as steps:
            ask()
        assert len(steps) < 10, name
    database.close()


@contextmanager
def steps_of_sqlite() -> Iterator[list[int]]:
    """One entry for each hundred steps that SQLite's machine takes: a walk through rows takes some for each."""
    steps: list[int] = []

    def count() -> int:
        steps.append(1)
        return 0

    def on_connect(connection: Any, _: object) -> None:
        connection.set_progress_handler(count, 100)

    event.listen(sa.Engine, "connect", on_connect)
    try:
        yield steps
    finally:
        event.remove(sa.Engine, "connect", on_connect)
