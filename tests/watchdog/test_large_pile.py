"""F20: a million rows wait. A claim reads what it takes and no row more, and the pile drains.

What is counted is what the database read, by its own count, never time. The rows are whole: a real
watchdog sends them to a real broker. In the ordinary tests PostgreSQL stands for all three.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from qmq_client.ids import MESSAGE_IDS
from qmq_client.message import Message, message_to_record
from qmq_client.outbox.table import LIVE, create_tables
from qmq_client.wire.checksum import crc32c
from qmq_client.wire.record import encode_record
from qmq_watchdog.databases import Database
from tests.conftest import MakeDatabase
from tests.kit.broker_process import BrokerProcess
from tests.services.databases import KINDS
from tests.services.databases import Database as ServedDatabase
from tests.watchdog.rows import DEAD_SENDER, OUTBOX, SUBJECT
from tests.watchdog.test_servers import as_database

ROWS: Final = 1_000_000
ROWS_PER_INSERT: Final = 10_000
#: What one claim takes here, and the pile that the million is compared with.
CLAIMED: Final = 1_000
SMALL_PILE: Final = 2 * CLAIMED
#: Of the million these are sent in the ordinary tests.
DRAINED: Final = 50_000
#: How much more a claim may read than the same claim of a small pile: room for another plan, and for
#: what claims before it have left behind in an index; far from the size of the pile.
TIMES_MORE_MAX: Final = 4
#: What a look for the metrics may read; it counts up to ten thousand rows, in three ways.
LOOK_ROWS_MAX: Final = 10_000
#: The memory that a long sweep may need beyond a short one.
GROWTH_BYTES_MAX: Final = 64 * 1024 * 1024
MILLION_S_MAX: Final = 1_800


class Reads:
    """What a database read for one connection, by its own count."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._steps = 0

    def begin(self, connection: sa.Connection) -> None:
        """The count starts."""
        if self._kind == "sqlite":
            driver_of(connection).set_progress_handler(self._on_step, 1)
        self._before = self._total(connection)

    def end(self, connection: sa.Connection) -> int:
        """Rows and index entries since; for SQLite steps of its machine."""
        found = self._total(connection) - self._before
        if self._kind == "sqlite":
            driver_of(connection).set_progress_handler(None, 1)
        return found

    def _on_step(self) -> int:
        self._steps += 1
        return 0

    def _total(self, connection: sa.Connection) -> int:
        if self._kind == "sqlite":
            return self._steps
        with driver_of(connection).cursor() as cursor:
            if self._kind == "mysql":
                cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read%'")
                return sum(int(value) for _, value in cursor.fetchall())
            cursor.execute(
                "SELECT sum(pg_stat_get_xact_tuples_returned(oid)) FROM pg_class "
                "WHERE relname LIKE 'qmq_outbox%' AND relkind IN ('r', 'i')"
            )
            return int(cursor.fetchone()[0])


def driver_of(connection: sa.Connection) -> Any:
    """The driver's own connection."""
    return connection.connection.driver_connection


@contextmanager
def counted(database: Database) -> Iterator[list[int]]:
    """What each transaction of the store read, one number each."""
    reads = Reads(database.engine.dialect.name.replace("mariadb", "mysql"))
    found: list[int] = []
    sibling = database.store._own.engine

    def after(connection: sa.Connection, _: Any, statement: str, *__: Any) -> None:
        if statement.startswith(("BEGIN", "START TRANSACTION")):
            reads.begin(connection)

    def before(connection: sa.Connection, _: Any, statement: str, *__: Any) -> None:
        if statement == "COMMIT":
            found.append(reads.end(connection))

    event.listen(sibling, "after_cursor_execute", after)
    event.listen(sibling, "before_cursor_execute", before)
    try:
        yield found
    finally:
        event.remove(sibling, "after_cursor_execute", after)
        event.remove(sibling, "before_cursor_execute", before)


def claim_cost(database: Database) -> int:
    """What one claim of a batch reads."""
    token = os.urandom(16)
    with counted(database) as reads:
        taken = database.store.claim(token=token, limit=CLAIMED, lease_ms=3_600_000)
    assert len(taken) == CLAIMED
    return sum(reads)


def whole_rows(count: int) -> Iterator[tuple[bytes, bytes]]:
    """Message ids with records that differ in their ids only."""
    record = message_to_record(Message(SUBJECT, b"{}"), new_id=bytes(16), now_ms=1)
    after_id = encode_record(record)[20:]
    subject_crc = crc32c(SUBJECT.encode())
    for _ in range(count):
        message_id = MESSAGE_IDS.next_id()
        content = message_id + after_id
        yield message_id, crc32c(content, subject_crc).to_bytes(4, "big") + content


def put_pile(database: Database, count: int) -> None:
    """Rows of a dead sender, due for a second."""
    with database.engine.begin() as connection:
        now_ms = connection.scalar(sa.select(database.store.now_ms)) or 0
        times = {"due_at_ms": now_ms - 1_000, "created_at_ms": now_ms - 1_000}
        if connection.dialect.name == "postgresql":
            # ANALYZE keeps a snapshot: meanwhile claims read index entries of rows that are gone
            connection.exec_driver_sql("ALTER TABLE qmq_outbox SET (autovacuum_enabled = off)")
            copy_rows(connection.connection.driver_connection, count, times)
        else:
            insert_rows(connection, count, times)


def copy_rows(driver: Any, count: int, times: dict[str, int]) -> None:
    common = f"{SUBJECT}\t{LIVE}\t\\\\x{DEAD_SENDER.hex()}\t0"
    common += f"\t{times['due_at_ms']}\t{times['created_at_ms']}\n"
    columns = "message_id, record, subject, state, token, attempts, due_at_ms, created_at_ms"
    with driver.cursor() as cursor, cursor.copy(f"COPY qmq_outbox ({columns}) FROM STDIN") as copy:
        lines = []
        for message_id, record in whole_rows(count):
            lines.append(f"\\\\x{message_id.hex()}\t\\\\x{record.hex()}\t{common}")
            if len(lines) == ROWS_PER_INSERT:
                copy.write("".join(lines))
                lines.clear()
        copy.write("".join(lines))


def insert_rows(connection: sa.Connection, count: int, times: dict[str, int]) -> None:
    same = {"subject": SUBJECT, "token": DEAD_SENDER, "state": LIVE, "attempts": 0, **times}
    rows = whole_rows(count)
    for first in range(0, count, ROWS_PER_INSERT):
        batch = [
            {"message_id": message_id, "record": record, **same}
            for _, (message_id, record) in zip(
                range(min(ROWS_PER_INSERT, count - first)), rows, strict=False
            )
        ]
        connection.execute(sa.insert(OUTBOX), batch)


def swept(served: ServedDatabase, broker_url: str, rows_max: int) -> tuple[str, int]:
    """`qmq watchdog sweep` as a process: what it says, and the most memory it had, in bytes."""
    command = [sys.executable, "-m", "qmq_client.cli", "watchdog", "sweep"]
    command += ["--database", served.url, "--broker", broker_url]
    bounds = {"QMQ_WATCHDOG_SWEEP_ROWS_MAX": f"{rows_max}", "QMQ_WATCHDOG_SWEEP_S_MAX": "1500"}
    process = subprocess.Popen(
        command, env=os.environ | bounds, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    with process.stdout:
        said = process.stdout.read().decode()
    _, _, used = os.wait4(process.pid, 0)
    process.returncode = 0  # waited for already
    return said, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def left_count(database: Database) -> int:
    with database.engine.connect() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(OUTBOX)) or 0


@pytest.mark.timeout(MILLION_S_MAX)
@pytest.mark.parametrize("kind", KINDS)
def test_F20_W1_a_million_waiting_rows_make_no_claim_dearer_and_drain_in_bounded_memory(
    kind: str,
    make_database: MakeDatabase,
    broker_process: BrokerProcess,
    request: pytest.FixtureRequest,
) -> None:
    is_release = request.config.getoption("--release")
    if kind != "postgresql" and not is_release:
        pytest.skip("before a release only; PostgreSQL stands for it")
    served = make_database(kind)
    database = as_database(served.engine())
    create_tables(database.engine)
    put_pile(database, SMALL_PILE)
    small = claim_cost(database)
    assert claim_cost(database) <= small * TIMES_MORE_MAX, "the whole of the small pile is taken"
    put_pile(database, ROWS)

    large = claim_cost(database)
    assert CLAIMED <= large <= small * TIMES_MORE_MAX
    with counted(database) as reads:
        assert database.store.oldest_unsent_age_ms() is not None
        assert database.store.counts(rows_max=LOOK_ROWS_MAX).due == LOOK_ROWS_MAX
    assert sum(reads) <= 10 * LOOK_ROWS_MAX * (50 if kind == "sqlite" else 1)

    print(f"\n{kind}: a claim reads {small}, of a million {large}; a look reads {sum(reads)}")
    drained = ROWS - CLAIMED if is_release else DRAINED
    _, short_bytes = swept(served, broker_process.url, CLAIMED)
    said, long_bytes = swept(served, broker_process.url, drained - CLAIMED)
    assert f"sent={drained - CLAIMED}" in said
    assert left_count(database) == SMALL_PILE + ROWS - drained
    assert long_bytes - short_bytes <= GROWTH_BYTES_MAX
    if not is_release:
        assert claim_cost(database) <= small * TIMES_MORE_MAX
    database.close()
