"""A batch is written down while the next one goes to the broker: nothing of what it comes to is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sqlalchemy as sa

from qmq_client.errors import DatabaseUnavailableError
from qmq_client.outbox.database.claiming import CLAIM_BYTES_MAX
from qmq_client.transport.memory import MemoryBroker, MemoryTransport
from qmq_client.wire.frame import parse_message_frame
from qmq_client.wire.message_id import format_message_id
from qmq_client.wire.requests import SendAnswer
from qmq_watchdog.databases import Database
from qmq_watchdog.sweep import Sweep, SweepOptions
from tests.watchdog.executors import LateExecutor
from tests.watchdog.rows import OUTBOX, left, make_due, put_rows
from tests.watchdog.transports import sent_ids

BATCH = SweepOptions(batch_rows=10)


class FrameTransport(MemoryTransport):
    """Shows somebody the message ids of each frame, and its number, before it goes out."""

    def __init__(self, broker: MemoryBroker, on_frame: Callable[[int, list[bytes]], None]) -> None:
        super().__init__(broker)
        self._on_frame = on_frame

    def send(self, frame: bytes) -> SendAnswer:
        self._on_frame(self.calls["send"] + 1, parse_message_frame(frame).message_ids())
        return super().send(frame)


@pytest.mark.parametrize("stolen", [2, 6], ids=["beside the next", "the last"])
def test_O3_rows_that_another_took_over_while_they_were_sent_count_as_lost(
    database: Database, broker: MemoryBroker, stolen: int
) -> None:
    put_rows(database, 60)
    taken: list[bytes] = []

    def take_over(number: int, message_ids: list[bytes]) -> None:
        if number == stolen:
            taken.extend(message_ids)
            with database.engine.begin() as connection:
                connection.execute(
                    sa.update(OUTBOX)
                    .where(OUTBOX.c.message_id.in_(message_ids))
                    .values(token=b"another watchdog")
                )

    counts = Sweep(database, FrameTransport(broker, take_over), BATCH).step()
    assert (counts.sent, counts.lost, counts.error) == (60, 10, None)
    assert left(database) == set(taken)


def test_O1_a_settlement_beside_that_fails_ends_the_sweep_and_its_rows_come_again(
    database: Database, broker: MemoryBroker
) -> None:
    ids = put_rows(database, 100)

    def break_it(number: int, _: list[bytes]) -> None:
        if number == 3:
            with database.engine.begin() as connection:
                # In this order: SQLite's driver commits each, and what may be marked instead of deleted is.
                for change in ("UPDATE OF state", "DELETE"):
                    connection.exec_driver_sql(
                        f"CREATE TRIGGER broken_{change[:6]} BEFORE {change} ON qmq_outbox "
                        "BEGIN SELECT RAISE(ABORT, 'broken'); END"
                    )

    sweep = Sweep(database, FrameTransport(broker, break_it), BATCH)
    counts = sweep.step()
    assert isinstance(counts.error, DatabaseUnavailableError)
    assert counts.sent in {30, 40}  # met before the next one is begun
    with database.engine.begin() as connection:
        connection.exec_driver_sql("DROP TRIGGER broken_DELETE")
        connection.exec_driver_sql("DROP TRIGGER broken_UPDATE")
    make_due(database)
    assert sweep.step().error is None
    assert (sorted(map(str, sent_ids(broker))), left(database)) == (
        sorted(map(format_message_id, ids)),
        set(),
    )


def test_O4_rows_of_a_key_are_not_held_back_by_those_whose_settlement_is_under_way(
    database: Database, broker: MemoryBroker
) -> None:
    put_rows(database, 10)
    keyed = put_rows(database, 30)
    with database.engine.begin() as connection:
        connection.execute(
            sa.update(OUTBOX).where(OUTBOX.c.message_id.in_(keyed)).values(ordering_key="k")
        )
    sweep = Sweep(database, MemoryTransport(broker), BATCH, executor=LateExecutor)
    counts = sweep.step()
    assert (counts.sent, counts.held, left(database)) == (40, 0, set())
    assert sent_ids(broker)[10:] == [format_message_id(each) for each in keyed]


def test_W1_a_claim_that_its_bytes_ended_is_not_taken_for_the_last(
    database: Database, broker: MemoryBroker
) -> None:
    body = bytes(3 * 1024 * 1024)
    put_rows(database, CLAIM_BYTES_MAX // len(body) + 5, body=body)
    counts = Sweep(database, MemoryTransport(broker)).step()
    assert (counts.sent, left(database)) == (CLAIM_BYTES_MAX // len(body) + 5, set())
