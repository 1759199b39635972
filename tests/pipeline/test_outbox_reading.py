"""Rows of an outbox come the same out of every database, whatever stands in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa

from qmq_client.errors import DatabaseUnavailableError
from qmq_client.outbox.table import DEFAULT_TABLES, LIVE, PARKED, SENT, create_tables
from qmq_client.settings.sections import DatabaseSection
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.rows.outbox import HEAD_BYTES, OPEN, RAW, STATES, batches, row_reader
from tests.conftest import MakeDatabase
from tests.pipeline.world import START_MS, OutboxDatabase, messages, outbox_rows
from tests.services.databases import Databases

OUTBOX = DEFAULT_TABLES.outbox
#: More than a part of rows that are taken from the cursor at a time.
ROWS = 1_203
TEXTS = (
    None,
    "",
    'a "quoted", text',
    "two\nlines\r\nand\ra\ttab",
    "\\N back\\slash",
    "NULL",
    "Grüße 🐟",
    '"',
    "0x00",
    "e" * 40_000,
)
RECORDS = (None, b"", b"\x00", b'"\n,', bytes(range(256)) * 400)
#: Milliseconds since 1970, and before.
TIMES = (START_MS, 0, -1, -86_400_000, 2**53)


def odd_rows() -> list[dict[str, Any]]:
    """Rows of which no value is like those that producers write, but for the types."""
    rows = outbox_rows(messages(MessageIds(1), ROWS), START_MS)
    for number, row in enumerate(rows):
        record = RECORDS[number % len(RECORDS)]
        row["subject"] = ("plain", 'a,"b"', "", "'\\")[number % 4]
        row["record"] = row["record"] if record is None else record
        row["state"] = (LIVE, PARKED, SENT)[number % 3]
        row["attempts"] = (0, 1, 2**31 - 1)[number % 3]
        row["last_error"] = TEXTS[number % len(TEXTS)] if number < 100 else None
        row["created_at_ms"] = TIMES[number % len(TIMES)]
        row["due_at_ms"] = TIMES[number // 2 % len(TIMES)]
    return rows


def raw(row: dict[str, Any], row_id: int) -> dict[str, Any]:
    """What is read of a row, by plain Python."""
    own = {name: row[name] for name in RAW.names if name in row}
    data = row["record"]
    return {**own, "id": row_id, "head": data[:HEAD_BYTES], "record_bytes": len(data)}


def values(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """SQLite calls the beginning of nothing NULL."""
    return [{**row, "head": row["head"] or b""} for row in batch.to_pylist()]


@pytest.mark.parametrize("kind", ["sqlite", "mysql", "postgresql"])
def test_every_value_of_every_database_is_the_one_that_was_written(
    make_database: MakeDatabase, kind: str
) -> None:
    database = make_database(kind)
    engine = database.engine()
    create_tables(engine)
    rows = odd_rows()
    with engine.begin() as connection:
        for first in range(0, ROWS, 100):
            connection.execute(sa.insert(OUTBOX), rows[first : first + 100])
        ids = list(connection.execute(sa.select(OUTBOX.c.id).order_by(OUTBOX.c.id)).scalars())
    wanted = [raw(row, row_id) for row, row_id in zip(rows, ids, strict=True)]
    with engine.connect() as connection:
        read = row_reader(connection, OUTBOX)
        found = read(OUTBOX.c.id >= 0, ROWS + 1)
        assert found.schema == RAW
        assert values(found) == wanted
        assert values(read(OUTBOX.c.id > ids[6], 500)) == wanted[7:507]
        assert values(read(OUTBOX.c.id.in_([ids[9], ids[3]]), 2)) == [wanted[3], wanted[9]]
        assert read(OUTBOX.c.id < 0, 10).num_rows == 0
        assert not connection.in_transaction()
    engine.dispose()
    section = DatabaseSection(name="orders", url=database.url)
    several = batches(section, first_id=0, next_id=ids[-1] + 1, scanned_at_ms=0)
    table = pa.Table.from_batches(list(several))
    assert table["row_id"].to_pylist() == ids
    assert table["message_id"].to_pylist() == [row["message_id"].hex() for row in rows]
    assert table["state"].to_pylist() == [STATES[row["state"]] for row in rows]
    assert table["created_at"].cast(pa.int64()).to_pylist() == [
        1000 * row["created_at_ms"] for row in rows
    ]
    changed = batches(
        section, first_id=0, next_id=ids[-1] + 1, scanned_at_ms=0, changed_since_ms=2**53 + 1
    )
    open_ids = [one for one, row in zip(ids, rows, strict=True) if row["state"] in OPEN]
    assert [one for batch in changed for one in batch["row_id"].to_pylist()] == open_ids


def test_a_line_that_the_server_cannot_send_whole_is_read_by_its_values(
    databases: Databases,
) -> None:
    """Each quote of the error becomes two in the line, which is then longer than the packet."""
    server = databases.private_server("mysql", options=["--max-allowed-packet=16384"])
    try:
        server.start()
        engine = databases.make_on(server.url(), "mysql", "orders").engine()
        create_tables(engine)
        with engine.begin() as connection:
            connection.execute(sa.insert(OUTBOX), outbox_rows(messages(MessageIds(1), 3), START_MS))
            long = sa.update(OUTBOX).where(OUTBOX.c.id == 2)
            connection.execute(long.values(last_error=sa.func.repeat('"', 12_000)))
        with engine.connect() as connection:
            found = row_reader(connection, OUTBOX)(OUTBOX.c.id > 0, 10)
        assert found["last_error"].to_pylist() == [None, '"' * 12_000, None]
        engine.dispose()
    finally:
        server.close()


def test_what_the_driver_refuses_while_rows_come_is_an_error_of_ours(tmp_path: Path) -> None:
    database = OutboxDatabase(tmp_path / "orders.db")
    database.insert(messages(MessageIds(1), 3), created_at_ms=START_MS)
    no_text = sa.text("UPDATE qmq_outbox SET subject = CAST(x'ff' AS TEXT) WHERE id = 2")
    database.execute(no_text)
    with pytest.raises(DatabaseUnavailableError, match=r"orders: .*UTF-8"):
        list(batches(database.section, first_id=0, next_id=9, scanned_at_ms=0))
    database.close()
