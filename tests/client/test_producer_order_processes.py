"""O4 among real processes, one of them killed, at a real broker."""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path

from qmq_client.message import Message, record_to_message
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.record import decode_record
from qmq_client.wire.requests import PullRequest
from tests.client.publishing import sweep
from tests.client.world import OUTBOX, SUBJECT, World, a_world
from tests.kit import warm
from tests.kit.broker_process import BrokerProcess
from tests.services.databases import Database

COUNT = 60
KILLED_AFTER = 20
END_S_MAX = 60


def start(url: str, broker: str, name: str) -> warm.Process:
    line = ["tests.client.ordered_process", url, broker, name, str(COUNT)]
    return warm.start(line, stdout=subprocess.PIPE)


def accepted(broker: str) -> list[Message]:
    """All messages in the order in which the broker has taken them."""
    ask = PullRequest(subject=SUBJECT, group="g", consumer="c", max_messages=1_000)
    messages: list[Message] = []
    with closing(HttpTransport(broker)) as transport:
        while pulled := transport.pull(ask).messages:
            messages += [record_to_message(decode_record(SUBJECT, one.record)) for one in pulled]
    return messages


def sweep_all(world: World) -> None:
    for _ in range(100):
        if not world.read(f"SELECT 1 FROM {OUTBOX} WHERE state = 0"):
            return
        world.change(f"UPDATE {OUTBOX} SET due_at_ms = 0 WHERE state = 0")
        sweep(world, keep_ms=3_600_000)
    raise AssertionError("rows are left")


def test_O4_O1_processes_that_share_a_key_and_one_that_is_killed_keep_the_order_of_commits(
    tmp_path: Path, a_database: Database
) -> None:
    with (
        BrokerProcess(tmp_path / "broker") as broker,
        a_world(tmp_path, database=a_database) as world,
        closing(HttpTransport(broker.url)) as transport,
    ):
        processes = [start(world.url, broker.url, name) for name in ("a", "b", "killed")]
        killed = processes[2]
        assert killed.stdout is not None
        for line in killed.stdout:
            if int(line) == KILLED_AFTER:
                break
        killed.kill()
        for process in processes:
            process.communicate(timeout=END_S_MAX)
        assert [process.returncode for process in processes[:2]] == [0, 0]
        world.transport = transport
        sweep_all(world)
        rows = world.read(f"SELECT message_id, ordering_key, state FROM {OUTBOX} ORDER BY id")
        messages = accepted(broker.url)
    assert {row[2] for row in rows} == {2}
    assert len(rows) >= 2 * COUNT + KILLED_AFTER + 1
    assert len(messages) == len(rows), "lost or twice"
    for key in ("shared", "a", "b", "killed"):
        committed = [bytes(row[0]).hex() for row in rows if row[1] == key]
        assert [message.message_id for message in messages if message.key == key] == committed
