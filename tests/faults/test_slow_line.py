"""F33, F36: consumers behind a slow line, killed one after the other; the checker judges what they saw."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from qmq_client.ids import MESSAGE_IDS
from qmq_client.message import Message, message_to_record
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import build_message_frame
from qmq_client.wire.message_id import format_message_id
from qmq_client.wire.record import decode_record, encode_record
from tests.client.world import SUBJECT
from tests.conftest import MakeDatabase
from tests.faults.proxy import Proxy
from tests.faults.test_dying_consumers import Effects, broker, process_of
from tests.faults.test_killed_application import pull
from tests.faults.witness_process import GROUP, LEASE_MS
from tests.kit.broker_process import BrokerProcess
from tests.kit.checker import check
from tests.kit.events import Accepted, Attempt, Drained, Effect, Fault, Heal, Stored
from tests.kit.expectations import Group, Promises
from tests.kit.history import History, body_hash, read_histories
from tests.kit.waiting import wait_for

KILLS: Final = 3
MESSAGES: Final = 15
CONSUMERS: Final = 2

__all__ = ["broker"]


def send(broker_url: str, history: History, bodies: list[bytes]) -> None:
    """Hand messages to the broker as they are, with what the checker must know of them."""
    records = [
        message_to_record(Message(SUBJECT, body), new_id=MESSAGE_IDS.next_id(), now_ms=1)
        for body in bodies
    ]
    ids = [format_message_id(record.message_id) for record in records]
    for message_id, record in zip(ids, records, strict=True):
        hashed = body_hash(record.body, dict(record.headers))
        history.write(Attempt(message_id=message_id, subject=SUBJECT, body_hash=hashed))
    with closing(HttpTransport(broker_url)) as transport:
        transport.send(build_message_frame({SUBJECT: [encode_record(one) for one in records]}))
    history.write(*(Accepted(message_id=one, subject=SUBJECT) for one in ids))


def tell_the_end(broker_url: str, history: History, effects: list[str]) -> None:
    """What the broker and the database have."""
    for one in pull(broker_url, "reader"):
        record = decode_record(SUBJECT, one.record)
        history.write(
            Stored(
                message_id=format_message_id(record.message_id),
                subject=SUBJECT,
                sequence=one.sequence,
                offset=one.sequence,
                body_hash=body_hash(record.body, dict(record.headers)),
            )
        )
    history.write(*(Effect(group=GROUP, message_id=one) for one in effects))


def test_F33_F36_C1_C3_C5_consumers_killed_behind_a_slow_line_lose_and_double_nothing(
    make_database: MakeDatabase, broker: BrokerProcess, tmp_path: Path
) -> None:
    effects = Effects(make_database, "sqlite")
    seen = tmp_path / "seen"
    pull(broker.url, "reader")
    with (
        History.open(seen, "test") as history,
        Proxy(urlsplit(broker.url).port or 0) as line,
        ExitStack() as stack,
    ):
        line.is_slow = True
        url = f"http://127.0.0.1:{line.port}"
        names = [f"witness-{number}" for number in range(CONSUMERS + KILLS)]
        processes = {
            name: stack.enter_context(
                process_of("witness_process", effects.url, url, str(seen), name)
            )
            for name in names[:CONSUMERS]
        }
        for time in range(KILLS):
            send(broker.url, history, [f"{time}.{one}".encode() for one in range(MESSAGES)])
            wait_for(partial(effects.has_come_to, time * MESSAGES + MESSAGES // 3), effects.read)
            victim, name = names[time], names[CONSUMERS + time]
            history.write(Fault(kind="crash", target=victim, phase="begin"))
            processes[victim].kill()
            history.write(Fault(kind="crash", target=victim, phase="end"))
            processes[name] = stack.enter_context(
                process_of("witness_process", effects.url, url, str(seen), name)
            )
        line.is_slow = False
        history.write(Heal())
        wait_for(partial(effects.has_come_to, KILLS * MESSAGES), effects.read)
        history.write(Drained())
        tell_the_end(broker.url, history, effects.read())
    groups = {GROUP: Group(subjects=frozenset({SUBJECT}))}
    verdict = check(read_histories(seen), groups=groups, promises=Promises(lease_ms=LEASE_MS))
    assert not verdict.findings, verdict
    assert len(effects.read()) == KILLS * MESSAGES
