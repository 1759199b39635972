"""How many messages are asked for, and which go into one handler call."""

from __future__ import annotations

import threading

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.consumer.options import ConsumerOptions
from qmq_client.consumer.prefetch import Prefetch, Running
from qmq_client.testing import FakeClock
from tests.client.consumer.prefetching import (
    LONG_S,
    handle_one,
    prefetch_of,
    received,
    sizes,
    take_one,
    taken_by,
    working,
)
from tests.kit.waiting import wait_for


def test_the_first_question_is_for_one_batch_per_worker() -> None:
    assert prefetch_of(concurrency=4, batch_size=25).room(is_blocking=False) == 100


def test_nothing_is_asked_for_until_a_third_of_the_credit_is_free() -> None:
    clock = FakeClock()
    prefetch = prefetch_of(clock, concurrency=5)
    handle_one(prefetch, clock, 125)
    prefetch.put(received(*[1] * 10))
    asked: list[int] = []
    for count in range(1, 11):
        take_one(prefetch, clock, 125)
        asked.append(prefetch.room(is_blocking=False))
        assert prefetch.count == 10 - count
    assert asked == [0, 0, 0, 4, 5, 6, 7, 8, 9, 10]


def test_a_large_batch_is_pulled_while_one_is_handled_and_one_waits() -> None:
    clock = FakeClock()
    prefetch = prefetch_of(clock, batch_size=500)
    prefetch.put(received(*[1] * 500))
    take_one(prefetch, clock, 1, settled=500)
    assert prefetch.room(is_blocking=False) == 1_500
    prefetch.put(received(*[1] * 1_500))
    take_one(prefetch, clock, 1, settled=500)
    assert len(taken_by(prefetch)) == 500
    assert (prefetch.count, prefetch.room(is_blocking=False)) == (1_000, 500)


def test_what_a_handler_left_without_an_outcome_needs_no_worker_and_counts_alone() -> None:
    clock = FakeClock()
    prefetch = prefetch_of(clock, prefetch_max=3)
    rooms: list[int] = []
    for _ in range(3):
        handle_one(prefetch, clock, 1_000, settled=0)
        rooms.append(prefetch.room(is_blocking=False))
    assert rooms == [1, 1, 0]
    prefetch.leave(1)
    assert prefetch.room(is_blocking=False) == 1
    assert prefetch.count == 2


def test_the_credit_follows_the_speed_of_the_handler() -> None:
    clock = FakeClock()
    prefetch = prefetch_of(clock)
    rooms: list[int] = []
    for message_ms in (1, 1, 1, 1_000, 1_000, 1_000):
        handle_one(prefetch, clock, message_ms)
        rooms.append(prefetch.room(is_blocking=False))
    assert rooms[:3] == [250, 250, 250]
    assert rooms[3:] == [1, 1, 1]


def test_a_handler_that_hangs_counts_as_slow_while_it_hangs() -> None:
    clock = FakeClock()
    prefetch = prefetch_of(clock, concurrency=2)
    handle_one(prefetch, clock, 1)
    assert prefetch.room(is_blocking=False) == 500
    prefetch.put(received(1))
    prefetch.take(is_blocking=False)
    clock.advance(1_000)
    assert prefetch.room(is_blocking=False) == 1


def test_who_waits_for_room_is_woken_by_the_message_that_makes_it() -> None:
    options = ConsumerOptions(subject="s", group="g", batch_size=2, prefetch_max=2)
    prefetch = Prefetch(options, FakeClock(), look_s=10 * LONG_S)
    prefetch.put(received(1, 1))
    prefetch.take(is_blocking=False)
    prefetch.finish(0)
    rooms: list[int] = []
    asking = threading.Thread(target=lambda: rooms.append(prefetch.room(is_blocking=True)))
    asking.start()
    wait_for(lambda: prefetch._is_asked)
    prefetch.leave(1)
    asking.join(LONG_S)
    assert rooms == [1]


def test_the_credit_never_reaches_beyond_a_quarter_of_the_lease() -> None:
    clock = FakeClock()
    prefetch = prefetch_of(clock, lease_ms=100)
    handle_one(prefetch, clock, 1)
    assert prefetch.room(is_blocking=False) == 25


def test_what_was_delivered_before_comes_alone() -> None:
    prefetch = prefetch_of(batch_size=4)
    prefetch.put(received(1, 1, 2, 3, 1, 1, 1, 1, 1))
    assert sizes(prefetch) == [2, 1, 1, 4, 1]


def test_what_comes_alone_does_not_wait_for_company() -> None:
    clock = FakeClock()
    prefetch = prefetch_of(clock, batch_size=4, max_wait_ms=100)
    prefetch.put(received(2, 2, 1, 3, 1))
    assert sizes(prefetch) == [1, 1, 1, 1]  # the third cannot be joined by anything
    assert prefetch.count == 1
    clock.advance(100)
    assert sizes(prefetch) == [1]


def test_what_comes_alone_and_is_taken_out_hurries_nobody() -> None:
    clock = FakeClock()
    prefetch = prefetch_of(clock, batch_size=4, max_wait_ms=100)
    again, fresh = received(2), received(1)
    fresh[0].lease_ends_at_s = 60.0
    prefetch.put([*fresh, *again])
    assert prefetch.take_ending(30.0) == again
    assert sizes(prefetch) == []
    clock.advance(100)
    assert sizes(prefetch) == [1]


def test_a_stop_takes_what_waits_and_refuses_what_comes() -> None:
    prefetch = prefetch_of()
    prefetch.put(received(1, 1))
    assert len(prefetch.stop()) == 2
    assert prefetch.count == 0
    assert not prefetch.put(received(1))
    assert prefetch.take(is_blocking=True) is None
    assert prefetch.room(is_blocking=True) == 0


def test_a_stop_leaves_nothing_to_take_and_wakes_who_waits() -> None:
    """A worker that waits for a batch to fill would otherwise wait for the whole of it."""
    options = ConsumerOptions(subject="s", group="g", batch_size=4, max_wait_ms=15_000)
    prefetch = Prefetch(options, SYSTEM_CLOCK)
    prefetch.put(received(1, 1))
    taken: list[Running | None] = []
    worker = threading.Thread(target=lambda: taken.append(prefetch.take(is_blocking=True)))
    worker.start()
    wait_for(lambda: prefetch.idle == 1)
    assert len(prefetch.stop()) == 2
    worker.join(LONG_S)
    assert not worker.is_alive()
    assert taken == [None]
    assert prefetch.take(is_blocking=False) is None
    assert prefetch.stop() == []
    assert prefetch.count == 0


def test_what_is_about_to_lose_its_lease_is_taken_out_and_leaves_room() -> None:
    prefetch = prefetch_of(batch_size=2)
    late, timely = received(1), received(1)
    timely[0].lease_ends_at_s = 60.0
    prefetch.put([*late, *timely])
    assert prefetch.take_ending(30.0) == late
    assert prefetch.count == 1
    assert taken_by(prefetch) == timely


def test_what_nobody_can_begin_is_taken_out_and_leaves_room() -> None:
    prefetch = prefetch_of(batch_size=2)
    prefetch.put(received(1, 1, 1))
    assert len(prefetch.take_waiting()) == 3
    assert (prefetch.count, prefetch.room(is_blocking=False)) == (0, 2)
    assert prefetch.take(is_blocking=False) is None


def test_what_is_left_of_a_batch_waits_for_company_again() -> None:
    clock = FakeClock()
    prefetch = prefetch_of(clock, batch_size=2, max_wait_ms=100)
    prefetch.put(received(1, 1, 1))
    clock.advance(90)
    assert len(taken_by(prefetch)) == 2
    prefetch.finish(2)
    clock.advance(90)
    assert prefetch.take(is_blocking=False) is None
    clock.advance(10)
    assert len(taken_by(prefetch)) == 1


def test_an_idle_worker_has_begun_when_a_lone_message_is_put() -> None:
    options = ConsumerOptions(subject="s", group="g")
    prefetch = Prefetch(options, SYSTEM_CLOCK, begin_s=LONG_S)
    may_end = threading.Event()

    def work() -> None:
        prefetch.take(is_blocking=True)
        may_end.wait(LONG_S)
        prefetch.finish(1)

    worker = threading.Thread(target=work)
    worker.start()
    wait_for(lambda: prefetch.idle == 1)
    prefetch.put(received(1))
    began = [len(one.received) for one in prefetch.running()]
    may_end.set()
    worker.join(LONG_S)
    assert began == [1]
    assert prefetch.count == 0


def test_messages_without_an_idle_worker_are_put_at_once() -> None:
    prefetch = Prefetch(
        ConsumerOptions(subject="s", group="g"), FakeClock(), begin_s=threading.TIMEOUT_MAX
    )
    prefetch.put(received(1))
    assert prefetch.count == 1


def test_C6_a_worker_without_work_is_given_some_although_all_others_hang() -> None:
    prefetch = prefetch_of(concurrency=4)
    prefetch.put(received(1, 1, 1))
    may_end = threading.Event()
    workers = [working(prefetch, until=may_end) for _ in range(3)]
    wait_for(lambda: len(prefetch.running()) == 3)
    assert prefetch.room(is_blocking=False) == 1
    prefetch.put(received(1))
    assert prefetch.room(is_blocking=False) == 0
    may_end.set()
    for worker in workers:
        worker.join(LONG_S)


def test_nothing_is_asked_for_that_could_only_wait_behind_batches_that_are_not_full() -> None:
    """It would come to no handler before its lease ends, and be given back and asked for again."""
    clock = FakeClock()
    prefetch = prefetch_of(clock, batch_size=100)
    prefetch.put(received(1))
    assert len(taken_by(prefetch)) == 1
    clock.advance(60_000)
    assert prefetch.room(is_blocking=False) == 0
    prefetch.finish(1)
    assert prefetch.room(is_blocking=False) == 100


def test_a_batch_that_waits_for_company_is_filled() -> None:
    clock = FakeClock()
    prefetch = prefetch_of(clock, batch_size=10, max_wait_ms=100)
    prefetch.put(received(*[1] * 6))
    assert prefetch.room(is_blocking=False) == 4
    prefetch.put(received(*[1] * 4))
    assert sizes(prefetch) == [10]


def test_what_comes_alone_does_not_wait_behind_a_batch_while_a_worker_is_idle() -> None:
    prefetch = prefetch_of(concurrency=2, batch_size=4, max_wait_ms=50_000, lease_ms=100_000)
    prefetch.put(received(1, 1))
    may_end = threading.Event()
    workers = [working(prefetch, until=may_end) for _ in range(2)]
    wait_for(lambda: prefetch.idle == 2)
    prefetch.put(received(2))
    wait_for(lambda: len(prefetch.running()) == 2, within_s=LONG_S)
    assert sorted(len(one.received) for one in prefetch.running()) == [1, 2]
    may_end.set()
    for worker in workers:
        worker.join(LONG_S)


def test_who_waits_for_room_is_woken_when_the_last_message_is_taken_from_idle_workers() -> None:
    options = ConsumerOptions(subject="s", group="g", concurrency=4)
    prefetch = Prefetch(options, FakeClock(), look_s=10 * LONG_S)
    prefetch.put(received(1, 1, 1))
    may_end = threading.Event()
    first = working(prefetch, until=may_end)
    wait_for(lambda: len(prefetch.running()) == 1)
    prefetch.take(is_blocking=False)
    rooms: list[int] = []
    asking = threading.Thread(target=lambda: rooms.append(prefetch.room(is_blocking=True)))
    asking.start()
    wait_for(lambda: prefetch._is_asked)
    last = working(prefetch, until=may_end)
    asking.join(LONG_S)
    assert rooms == [1]
    may_end.set()
    for worker in (first, last):
        worker.join(LONG_S)


def test_of_what_comes_alone_one_is_asked_for_by_each_worker_of_a_slow_handler() -> None:
    """A batch of them would wait, be given back and asked for again: an attempt of each, each time."""
    clock = FakeClock()
    prefetch = prefetch_of(clock, concurrency=2, batch_size=50)
    prefetch.put(received(*[2] * 60, *[1] * 40))
    assert len(taken_by(prefetch)) == 1
    clock.advance(20_000)
    assert len(prefetch.take_waiting()) == 99
    assert prefetch.room(is_blocking=False) == 1
    prefetch.finish(1)
    assert prefetch.room(is_blocking=False) == 2
    prefetch.put(received(2, 1))
    assert len(prefetch.take_waiting()) == 2
    assert prefetch.room(is_blocking=False) == 100, "most of the last answer is new again"


def test_an_idle_worker_has_begun_when_its_batch_is_put() -> None:
    options = ConsumerOptions(subject="s", group="g", batch_size=4)
    prefetch = Prefetch(options, SYSTEM_CLOCK, begin_s=LONG_S)
    may_end = threading.Event()
    worker = working(prefetch, until=may_end)
    wait_for(lambda: prefetch.idle == 1)
    prefetch.put(received(1, 1, 1))
    assert [len(one.received) for one in prefetch.running()] == [3]
    assert prefetch.room(is_blocking=False) == 0
    may_end.set()
    worker.join(LONG_S)
