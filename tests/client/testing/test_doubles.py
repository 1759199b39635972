"""The doubles for users' tests: honest, deterministic, and quick to write."""

from __future__ import annotations

import pytest

from qmq_client import Consumers, Delivery, Message, Reject, consumer
from qmq_client.errors import BrokerAnswerError, BrokerBusyError, BrokerRefusedError
from qmq_client.errors import BrokerUnreachableError as Unreachable
from qmq_client.ids import MESSAGE_IDS
from qmq_client.message import message_to_record
from qmq_client.testing import FakeClock, MemoryBroker, MemoryTransport, drain
from qmq_client.wire.frame import build_message_frame
from qmq_client.wire.record import encode_record


def frame_of(*messages: Message) -> bytes:
    records = [
        encode_record(message_to_record(one, new_id=MESSAGE_IDS.next_id(), now_ms=1))
        for one in messages
    ]
    return build_message_frame({messages[0].subject: records})


def test_a_users_test_needs_a_broker_a_handler_and_drain() -> None:
    clock = FakeClock()
    broker = MemoryBroker(clock=clock)
    seen: list[str] = []

    @consumer("orders", group="mail")
    def handler(body: str) -> None:
        seen.append(body)
        if body == "bad":
            raise Reject("not an order")
        if len(seen) == 1:
            raise ConnectionError("mail server")

    broker.put(Message("orders", "one"), Message("orders", "bad"))
    consumers = Consumers([handler], MemoryTransport(broker), clock=clock)
    report = drain(consumers)
    assert (report.handled, report.settled, report.failures) == (2, 2, 0)
    assert seen == ["one", "bad"]
    clock.advance(1_000)
    assert drain(consumers).handled == 1
    assert seen == ["one", "bad", "one"]
    assert [one.error for one in broker.dead_letters("orders", "mail")] == ["not an order"]
    assert broker.lag("orders", "mail") == 0


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=["Ctrl-C", "exit"])
def test_drain_ends_with_what_a_handler_raised_to_end_the_interpreter(
    error: BaseException, is_async: bool
) -> None:
    broker = MemoryBroker(clock=FakeClock())
    seen: list[str] = []

    def plain(body: str) -> None:
        seen.append(body)
        raise error

    async def asynchronous(body: str) -> None:
        plain(body)

    handler = consumer("orders", group="mail", batch_size=1)(asynchronous if is_async else plain)
    broker.put(Message("orders", "one"), Message("orders", "two"))
    with pytest.raises(type(error)) as raised:
        drain(Consumers([handler], MemoryTransport(broker)))
    assert raised.value is error
    assert seen == ["one"]
    assert (broker.in_flight("orders", "mail"), broker.lag("orders", "mail")) == (0, 2)


def test_drain_counts_calls_that_fail_and_does_not_repeat_them_forever() -> None:
    broker = MemoryBroker()
    broker.faults.is_unreachable = True
    handler = consumer("orders", group="mail")(lambda body: None)
    assert drain(Consumers([handler], MemoryTransport(broker))).failures == 1


def test_a_broker_shows_what_it_stored() -> None:
    broker = MemoryBroker()
    ids = broker.put(Message("orders", {"n": 1}, key="k"), Message("orders", "two"))
    stored = broker.messages("orders")
    assert [one.message_id for one in stored] == ids
    assert [one.body for one in stored] == [{"n": 1}, "two"]
    assert broker.messages("nothing") == []


def test_a_lost_answer_leaves_the_messages_stored() -> None:
    broker = MemoryBroker()
    broker.faults.lost_answers = 1
    transport, frame = MemoryTransport(broker), frame_of(Message("orders", 1))
    with pytest.raises(Unreachable):
        transport.send(frame)
    assert len(broker.messages("orders")) == 1
    assert transport.send(frame).duplicates == 1
    assert len(broker.messages("orders")) == 1


def test_every_fault_is_the_error_that_it_stands_for() -> None:
    broker = MemoryBroker()
    transport, frame = MemoryTransport(broker), frame_of(Message("orders", 1))
    broker.faults.is_unreachable = True
    with pytest.raises(Unreachable):
        transport.send(frame)
    broker.faults.is_unreachable = False
    broker.faults.busy_retry_after_s = 3.0
    with pytest.raises(BrokerBusyError) as caught:
        transport.send(frame)
    assert caught.value.retry_after_s == 3.0
    broker.faults.busy_retry_after_s = None
    assert broker.messages("orders") == []
    broker.faults.garbage_answers = 1
    with pytest.raises(BrokerAnswerError):
        transport.send(frame)
    assert transport.send(frame).duplicates == 1


def test_a_message_may_be_refused_by_name() -> None:
    broker = MemoryBroker()
    broker.faults.refused_ids.add("ab" * 16)
    with pytest.raises(BrokerRefusedError) as caught:
        broker.put(Message("orders", 1, message_id="ab" * 16))
    assert caught.value.answer.message_id == "ab" * 16
    assert broker.messages("orders") == []


def test_D1_D4_the_double_keeps_delayed_messages_until_their_time() -> None:
    clock = FakeClock(now_ms=5)
    broker = MemoryBroker(clock=clock)
    late, gone, now = broker.put(
        Message("orders", "late", delay=60),
        Message("orders", "gone", delay=60),
        Message("orders", "now"),
    )
    transport = MemoryTransport(broker)
    assert transport.cancel((gone, now, "0" * 32)) == ("cancelled", "too_late", "unknown")
    assert [message.body for message in broker.messages("orders")] == ["now"]
    clock.advance(59_999)
    assert broker.lag("orders", "g") == 1
    clock.advance(1)
    assert [message.body for message in broker.messages("orders")] == ["now", "late"]
    assert transport.cancel((late,)) == ("too_late",)


def test_D4_the_double_does_not_store_what_was_withdrawn_before_it_came() -> None:
    clock = FakeClock(now_ms=5)
    broker = MemoryBroker(clock=clock)
    transport, late, known = MemoryTransport(broker), "ab" * 16, "cd" * 16
    broker.put(Message("orders", "known", message_id=known))
    assert transport.cancel((late,)) == ("unknown",)
    assert transport.cancel((late, known), withdrawn_from="orders") == ("unknown", "too_late")
    broker.put(Message("orders", "late", message_id=late))
    broker.put(Message("orders", "late", message_id=late, delay=1))
    broker.put(Message("bills", "another message", message_id=late))
    clock.advance(1_000)
    assert [message.body for message in broker.messages("orders")] == ["known"]
    assert [message.body for message in broker.messages("bills")] == ["another message"]
    assert transport.cancel((known,), withdrawn_from="bills") == ("unknown",)


def test_D4_the_double_cancels_an_id_of_two_subjects_in_the_one_that_is_named() -> None:
    broker = MemoryBroker(clock=FakeClock(now_ms=5))
    transport, message_id = MemoryTransport(broker), "ab" * 16
    broker.put(Message("orders", "a", message_id=message_id, delay=1))
    broker.put(Message("bills", "b", message_id=message_id))
    assert transport.cancel((message_id,), withdrawn_from="orders") == ("cancelled",)
    assert transport.cancel((message_id,)) == ("too_late",), "not in every subject"


@pytest.mark.parametrize("ordered", [False, True])
def test_dead_letters_of_the_double_are_delivered_again(ordered: bool) -> None:
    broker = MemoryBroker()
    attempts: list[int] = []

    @consumer("orders", group="g", ordered=ordered)
    def handler(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        if len(attempts) == 1:
            raise Reject("the first time")

    consumers = Consumers(handler, MemoryTransport(broker))
    broker.put(Message("orders", "x", key="k"))
    drain(consumers)
    assert [letter.error for letter in broker.dead_letters("orders", "g")] == ["the first time"]
    assert broker.replay_dead_letters("bills", "g") == 0
    assert broker.replay_dead_letters("orders", "g") == 1
    drain(consumers)
    assert (attempts, broker.dead_letters("orders", "g")) == ([1, 1], [])


def test_time_passes_when_told_to() -> None:
    clock = FakeClock(now_ms=5)
    clock.advance(1_500)
    clock.sleep(0.5)
    assert (clock.now_ms(), clock.monotonic_s()) == (2_005, 2.0)
    clock.jump(-10_000)
    assert (clock.now_ms(), clock.monotonic_s()) == (-7_995, 2.0)
    with pytest.raises(ValueError, match="only advances"):
        clock.advance(-1)
