"""C7: groups that get messages of one key one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from qmq_broker.errors import GroupConflictError
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.storage.reading import RecordReader
from qmq_client.group.key_queues import KeyQueues, key_number
from qmq_client.group.queue import Place
from qmq_client.wire.deliveries import Records
from qmq_client.wire.operations import DeadAnswer, DeadRequest
from qmq_client.wire.requests import Tags
from tests.broker.service.rig import GROUP, SUBJECT, Given, Rig


def send_keyed(rig: Rig, *pairs: str) -> None:
    """`a1` has the key `a`; `-1` has none."""
    for pair in pairs:
        rig.send(pair.encode(), key=None if pair[0] == "-" else pair[0])


def pull(rig: Rig, consumer: str = "one", **changes: object) -> Given:
    return rig.pull(consumer, ordered=True, **changes)


def test_C7_the_next_of_a_key_comes_when_the_one_before_is_acked(rig: Rig) -> None:
    send_keyed(rig, "a1", "a2", "b1", "a3", "-1", "-2", "b2")
    first = pull(rig)
    assert first.bodies == [b"a1", b"b1", b"-1", b"-2"]
    assert pull(rig, "two").bodies == []
    rig.settle(first.ack(first.part(0)))
    second = pull(rig, "two")
    assert second.bodies == [b"a2"]
    rig.settle(first.ack(first.part(1)))
    rig.settle(second.ack(), "two")
    assert pull(rig).bodies == [b"a3", b"b2"]


def test_C7_a_message_that_failed_holds_up_its_key_and_no_other(rig: Rig) -> None:
    send_keyed(rig, "a1", "a2", "b1", "b2")
    first = pull(rig, max_messages=1)
    rig.settle(first.nack(delay_ms=5_000))
    other = pull(rig)
    assert other.bodies == [b"b1"]
    rig.settle(other.ack())
    assert pull(rig).bodies == [b"b2"]
    rig.pass_ms(5_000)
    again = pull(rig)
    assert (again.bodies, again.attempts) == ([b"a1"], [2])
    rig.settle(again.ack())
    assert pull(rig).bodies == [b"a2"]


def test_C7_a_silent_consumer_keeps_its_key_in_order(rig: Rig) -> None:
    send_keyed(rig, "a1", "a2")
    pull(rig, "silent", lease_ms=1_000)
    rig.pass_ms(1_000)
    assert pull(rig, "two").bodies == []
    rig.pass_ms(1_000)
    assert pull(rig, "two").bodies == [b"a1"]


def test_C7_after_a_dead_letter_its_key_continues(rig: Rig) -> None:
    send_keyed(rig, "a1", "a2", "a3")
    rig.settle(pull(rig).reject("no"))
    second = pull(rig, max_attempts=1)
    assert second.bodies == [b"a2"]
    rig.settle(second.nack())
    assert pull(rig, max_attempts=1).bodies == [b"a3"]


def test_C7_the_order_holds_over_restarts_and_snapshots(rig: Rig) -> None:
    send_keyed(rig, "a1", "a2", "a3", "b1", "b2", "-1")
    first = pull(rig, max_messages=2)
    assert first.bodies == [b"a1", b"b1"]
    offset, content = rig.broker.delivery.snapshot(rig.now_ms)
    rig.store.actions.write_snapshot(offset, content())
    rig.restart()
    assert pull(rig, "two").bodies == [b"-1"]
    rig.settle(first.ack(first.part(0)))
    rig.restart()
    second = pull(rig, "two")
    assert second.bodies == [b"a2"]
    rig.settle(second.nack(delay_ms=1_000), "two")
    offset, content = rig.broker.delivery.snapshot(rig.now_ms)
    rig.store.actions.write_snapshot(offset, content())
    rig.restart()
    assert pull(rig).bodies == []
    rig.pass_ms(1_000)
    assert pull(rig).bodies == [b"a2"]


def test_C7_a_replayed_dead_letter_comes_behind_those_of_its_key(rig: Rig) -> None:
    send_keyed(rig, "a1", "a2", "a3")
    rig.settle(pull(rig).reject("no"))
    second = pull(rig)
    answer = rig.broker.changes.replay(DeadRequest(subject=SUBJECT, group=GROUP), rig.now_ms)
    assert answer.count == 1
    assert pull(rig).bodies == []
    rig.restart()
    bodies = second.bodies
    rig.settle(second.ack())
    for _ in range(2):
        given = pull(rig)
        bodies += given.bodies
        rig.settle(given.ack())
    assert bodies == [b"a2", b"a3", b"a1"]


def test_C7_an_expired_message_does_not_stop_its_key(rig: Rig) -> None:
    rig.send(b"a1", key="a", expires_at_ms=rig.now_ms - 1)
    rig.send(b"a2", key="a")
    assert pull(rig).bodies == [b"a2"]


def test_C7_at_most_once_lets_the_next_of_a_key_come_at_once(rig: Rig) -> None:
    send_keyed(rig, "a1", "a2")
    assert pull(rig, at_most_once=True).bodies == [b"a1"]
    assert pull(rig, at_most_once=True).bodies == [b"a2"]


def test_C7_a_group_that_has_no_order_refuses_a_pull_that_wants_one(rig: Rig) -> None:
    rig.pull()
    with pytest.raises(GroupConflictError) as refused:
        pull(rig)
    assert refused.value.field == "ordered"


def test_C7_with_tags_only_what_fits_is_in_order(rig: Rig) -> None:
    for number in range(6):
        rig.send(b"%d" % number, key="a", tags=("odd",) if number % 2 else ("even",))
    bodies: list[bytes] = []
    while (given := pull(rig, tags=Tags(any=("odd",)))).bodies:
        bodies += given.bodies
        rig.settle(given.ack())
    assert bodies == [b"1", b"3", b"5"]


def test_B10_a_stuck_key_holds_only_so_many_messages(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data", limits=ServiceLimits(unsettled_per_group=10))
    send_keyed(rig, *[f"a{number}" for number in range(30)])
    given = pull(rig)
    assert given.bodies == [b"a0"]
    (status,) = rig.broker.query.groups()
    assert (status.cursor, status.held, status.lag) == (10, 9, 29)
    for number in range(1, 30):
        rig.settle(given.ack())
        given = pull(rig)
        assert given.bodies == [b"a%d" % number]
    rig.close()


def test_B10_an_ordered_group_reads_as_many_bytes_at_once_as_a_pull_brings(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_bytes: list[int] = []
    read = RecordReader.read

    def noted(self: RecordReader, entries: Sequence[Place], subject: str) -> Records:
        read_bytes.append(sum(length for _, length, _ in entries))
        return read(self, entries, subject)

    monkeypatch.setattr(RecordReader, "read", noted)
    for number in range(40):
        rig.send(b"b" * 600_000, key=str(number))
    request = DeadRequest(subject=SUBJECT, group=GROUP)
    for number in range(40):
        one = pull(rig, max_messages=1)
        assert one.sequences == [number]
        rig.settle(one.reject("no"))
    assert rig.broker.changes.replay(request, rig.now_ms) == DeadAnswer(count=27, has_more=True)
    assert rig.broker.changes.replay(request, rig.now_ms) == DeadAnswer(count=13)
    assert max(read_bytes) <= 16 * 1024 * 1024
    assert sum(length > 1024 * 1024 for length in read_bytes) == 2, "the two replays"
    again = [one for _ in range(40) for one in pull(rig).sequences]
    assert again == list(range(40))


def test_C7_only_the_head_of_a_key_queue_is_ready_whatever_is_done_in_which_order() -> None:
    queues = KeyQueues()
    for sequence in range(9):
        queues.add(sequence, key_number(b"abc"[sequence % 3 : sequence % 3 + 1]))
    assert queues.ready(10) == [0, 1, 2]
    queues.give(0, 2)
    assert queues.ready(10) == [2]
    assert queues.undelivered_count == 7
    queues.done(4, 5)
    queues.done(1, 2)
    assert queues.ready(10) == [2, 7], "the second of its key was done before it was its turn"
    queues.done(0, 9)
    assert (queues.ready(10), queues.undelivered_count, list(queues.sequences())) == ([], 0, [])


def test_keys_have_numbers_of_63_bits_and_only_no_key_has_none() -> None:
    assert key_number(b"") == 0
    assert key_number(b"N14228") == 5771211669733728295, "it stands in action logs"
    numbers = {key_number(b"key %d" % number) for number in range(10_000)}
    assert len(numbers) == 10_000
    assert all(0 < number < 2**63 for number in numbers)
