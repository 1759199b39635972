"""What a publisher does with a database that refuses something of it for as long as it lasts."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

from qmq_client.publishing.publisher import Deletes
from qmq_client.testing import MemoryTransport
from qmq_client.wire.requests import SendAnswer
from tests.client.publishing import send_each, sweep, with_transport
from tests.client.world import OUTBOX, a_world
from tests.services.databases import Database

#: How each driver is told that the application speaks no Unicode with its server.
NARROW = {"mysql": {"charset": "latin1"}, "postgresql": {"client_encoding": "latin1"}}
#: Of accepted rows that wait for their delete.
IDS_MAX = 100_000
UNSPEAKABLE = "日本語 😀 …"


def test_O6_O7_an_error_that_a_narrow_connection_cannot_spell_is_noted_and_parks_its_row(
    tmp_path: Path, a_server_database: Database
) -> None:
    class Poisoned(MemoryTransport):
        def send(self, frame: bytes) -> SendAnswer:
            if b"poison" in frame:
                raise ValueError(UNSPEAKABLE)
            return super().send(frame)

    narrow = {"connect_args": NARROW[a_server_database.kind]}
    with a_world(tmp_path, database=a_server_database, engine_options=narrow) as world:
        world.transport = Poisoned(world.broker)
        with_transport(world, world.transport)
        with Session(world.engine) as session, session.begin():
            world.send("poison", session)
        send_each(world, 2)
        assert world.producer.flush().is_done
        assert world.sent() == ["0", "1"]
        ((attempts, error),) = world.read(f"SELECT attempts, last_error FROM {OUTBOX}")
        assert (attempts, error) == (1, r"ValueError: \u65e5\u672c\u8a9e \U0001f600 ...")
        for _ in range(49):
            world.make_due()
            outcome = sweep(world)
        assert [row.error for row in outcome.parked] == [error]


def test_S5_W8_a_database_that_refuses_to_delete_is_asked_later_and_later_whoever_hurries(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with a_world(tmp_path) as world:
        # Nor can it be marked that they are there still.
        for name, change in (("keep", "DELETE"), ("fix", "UPDATE OF state")):
            world.change(
                f"CREATE TRIGGER {name} BEFORE {change} ON {OUTBOX} "
                "BEGIN SELECT RAISE(ABORT, 'no'); END"
            )
        publisher = world.producer._publisher
        with caplog.at_level(logging.WARNING):
            now_s = 0.0
            for i in range(600):  # more than are deleted at once
                send_each(world, 1)
                publisher.step(now_s := i / 10, is_hurried=True)
                publisher.step(now_s, is_hurried=True)
        # 60 s, at first after 0.1 s and then twice as long each time, up to 2 s.
        assert caplog.text.count("outbox delete failed") == publisher.stats.database_errors
        assert 20 < publisher.stats.database_errors < 40
        assert publisher.stats.sent == 600
        world.change("DROP TRIGGER keep")
        world.change("DROP TRIGGER fix")
        assert publisher.step(now_s + 2, is_hurried=True).deleted == 600
        assert publisher.is_idle
        # The next refusal is the first one again.
        send_each(world, 1)
        assert publisher.step(now_s + 2, is_hurried=True).deleted == 1


def test_S5_a_database_that_refuses_for_long_fills_no_memory_with_ids() -> None:
    waiting = Deletes(delay_ms=200)
    for first in range(0, IDS_MAX + 2_000, 1_000):
        waiting.add([number.to_bytes(16) for number in range(first, first + 1_000)], now_s=0.0)
    assert len(waiting.message_ids) == IDS_MAX
    # The oldest are let go of: their rows fall due first.
    assert waiting.message_ids[0] == (2_000).to_bytes(16)


def test_W8_after_a_success_the_next_refusal_is_the_first_one_again() -> None:
    waiting = Deletes(delay_ms=0)
    waiting.add([bytes(16)], now_s=0.0)
    pauses_s = []
    for _ in range(3):
        waiting.on_failure(0.0)
        pauses_s.append(waiting.wait_s(0.0))
    waiting.on_deleted()
    waiting.add([bytes(16)], now_s=0.0)
    waiting.on_failure(0.0)
    assert [*pauses_s, waiting.wait_s(0.0)] == [0.1, 0.2, 0.4, 0.1]
