"""F13: the line between the application and its broker, or its database, is cut and healed again."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.producer import Producer
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.record import record_message_id
from tests.client.publishing import WATCHDOG, sweep
from tests.client.world import SUBJECT, Order, World, a_world
from tests.faults.proxy import Proxy, Way
from tests.faults.test_killed_application import pull
from tests.faults.test_lost_commit_answers import a_world_behind
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S
from tests.services.databases import Database

FLAPS: Final = 3
#: How long the producer waits for an answer of the broker, where it never comes.
ANSWER_S: Final = 0.5


def place(world: World, producer: Producer, label: str) -> None:
    with Session(world.engine) as session, session.begin():
        session.execute(sa.insert(Order).values(label=label))
        producer.send(Message(SUBJECT, label), session=session)


def test_F13_O1_O5_W8_a_flapping_line_to_the_broker_loses_and_doubles_nothing(
    a_database: Database, broker_process: BrokerProcess, tmp_path: Path
) -> None:
    group = f"f13-{a_database.kind}"
    pull(broker_process.url, group)
    address = urlsplit(broker_process.url)
    with (
        Proxy(address.port or 80) as proxy,
        a_world(tmp_path, database=a_database) as world,
        closing(HttpTransport(f"http://127.0.0.1:{proxy.port}")) as transport,
        Producer(
            world.engine,
            transport,
            options=ProducerOptions(breaker_first_ms=10, breaker_max_ms=20),
        ) as producer,
    ):
        for i in range(FLAPS):
            place(world, producer, f"{i} before")
            proxy.cut()
            place(world, producer, f"{i} while cut")
            producer.flush(DEADLINE_S)
            proxy.heal()
            place(world, producer, f"{i} after")
            producer.flush(DEADLINE_S)
        world.make_due()
        left = world.store.claim(token=WATCHDOG, limit=100, lease_ms=60_000)
        there = [record_message_id(each.record) for each in pull(broker_process.url, group)]
        assert len(there) == len(set(there))
        stored = {row.message_id for row in left}
        assert len(stored | set(there)) == FLAPS * 3 == len(world.committed_orders())


def test_F13_S1_S2_a_line_to_the_database_that_is_cut_in_a_transaction_undoes_it(
    a_server_database: Database, tmp_path: Path
) -> None:
    with (
        Proxy(sa.make_url(a_server_database.url).port or 0) as proxy,
        a_world_behind(proxy, a_server_database, tmp_path) as world,
    ):
        with Session(world.engine) as session:
            session.execute(sa.insert(Order).values(label="lost"))
            world.send("lost", session)
            proxy.cut()
            with pytest.raises(sa.exc.OperationalError):
                session.commit()
        proxy.heal()
        place(world, world.producer, "a")
        assert world.outcome() == (["a"], ["a"], set())


@pytest.mark.parametrize("way", ["requests", "answers"])
def test_F13_O1_O5_a_line_to_the_broker_open_in_one_direction_loses_and_doubles_nothing(
    sqlite_database: Database, broker_process: BrokerProcess, tmp_path: Path, way: Way
) -> None:
    """What was given up as unanswered arrives when the line is healed, beside its repetition."""
    group = f"f13-one-way-{way}"
    pull(broker_process.url, group)
    with (
        Proxy(urlsplit(broker_process.url).port or 80) as proxy,
        a_world(tmp_path, database=sqlite_database) as world,
        closing(
            HttpTransport(f"http://127.0.0.1:{proxy.port}", answer_timeout_s=ANSWER_S)
        ) as transport,
        Producer(world.engine, transport, options=ProducerOptions(breaker_first_ms=10)) as producer,
    ):
        place(world, producer, "before")
        producer.flush(DEADLINE_S)  # a busy disk may take longer than is waited for here
        proxy.hold(way)
        place(world, producer, "while held")
        assert proxy.held.wait(DEADLINE_S)
        assert not producer.flush(DEADLINE_S)
        proxy.heal()
        place(world, producer, "after")
        producer.flush(DEADLINE_S)
        world.make_due()
        with closing(HttpTransport(broker_process.url)) as straight:
            world.transport = straight
            while sweep(world).sent:
                pass
    there = [record_message_id(each.record) for each in pull(broker_process.url, group)]
    assert len(there) == len(set(there)) == len(world.committed_orders()) == 3
