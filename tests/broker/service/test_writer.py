"""One writer: what waits is one commit, and nothing is said before the sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from qmq_broker.errors import (
    BusyError,
    ConflictError,
    DiskFullError,
    PoisonedError,
    UnavailableError,
)
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.serving import Serving
from qmq_broker.storage.store import Placed
from qmq_client.wire.frame import (
    MessageFrame,
    parse_message_frame,
)
from tests.broker.service.rig import SUBJECT, Rig, make_frame, new_ids

#: Longer than any test may take: whoever waits so long is seen.
FOR_EVER_S = 3600.0


class CountingStore:
    """Notes the order of the store's calls; everything else is the store's."""

    def __init__(self, rig: Rig) -> None:
        self.calls: list[str] = []
        self.on_commit: Callable[[], object] = lambda: None
        self.on_step: Callable[[], object] = lambda: None
        self._store = rig.store
        rig.broker.writer._store = self  # type: ignore[assignment]  # in its place

    def append(self, frames: list[MessageFrame]) -> list[Placed]:
        self.calls.append(f"append {len(frames)}")
        return self._store.append(frames)

    def commit(self) -> None:
        self.calls.append("commit")
        self._store.commit()
        self.on_commit()

    def step(self) -> bool:
        self.calls.append("step")
        self.on_step()
        return self._store.step()


def test_everything_that_waits_is_one_append_and_one_sync(rig: Rig) -> None:
    store = CountingStore(rig)
    outcomes = [rig.submit(make_frame([b"a"], subject=f"s{number}")) for number in range(5)]
    counts = rig.broker.writer.step()
    assert (counts.requests, counts.messages) == (5, 5)
    assert store.calls == ["append 5", "commit", "step"]
    rig.run_posted()
    assert all(isinstance(outcome, Placed) for (outcome,) in outcomes)


def test_B1_nobody_is_answered_before_the_sync(rig: Rig) -> None:
    outcomes = rig.submit(make_frame([b"a"]))
    assert outcomes == []
    rig.broker.writer.step()
    assert outcomes == [], "answered in the loop, behind the sync"
    rig.run_posted()
    assert len(outcomes) == 1


def test_no_answer_waits_for_what_the_store_does_by_time(rig: Rig) -> None:
    """A checkpoint is several syncs, once a second: one message in a hundred would wait for them."""
    order: list[str] = []
    store = CountingStore(rig)
    rig.broker.writer._post = lambda call: order.extend([*store.calls, "answered"])
    rig.submit(make_frame([b"a"]))
    rig.broker.writer.step()
    assert order == ["append 1", "commit", "answered"]
    assert store.calls == ["append 1", "commit", "step"]


@pytest.mark.parametrize(
    ("commit_ms", "turns"),
    [(0, [4]), (2, [3, 4]), (10, [1, 2, 3, 4, 4])],
)
def test_while_requests_keep_coming_the_store_has_its_turn_by_time_and_at_the_end(
    rig: Rig, commit_ms: int, turns: list[int]
) -> None:
    """Its turn takes as long as a small commit, and the answers behind it would wait for it."""
    store = CountingStore(rig)
    left = 4

    def commit() -> None:
        nonlocal left
        left -= 1
        rig.clock.pass_ms(commit_ms)
        if left:
            rig.submit(make_frame([b"a"]))
        else:
            rig.broker.writer.stop()

    store.on_commit = commit
    rig.submit(make_frame([b"a"]))
    rig.broker.writer.run()
    commits = [store.calls[: i + 1].count("commit") for i in _places_of("step", store.calls)]
    assert commits == turns


def test_the_store_has_its_turn_when_no_request_follows(rig: Rig) -> None:
    store = CountingStore(rig)
    store.on_step = rig.broker.writer.stop
    rig.submit(make_frame([b"a"]))
    rig.broker.writer.run()
    assert store.calls[:3] == ["append 1", "commit", "step"]


def test_B2_a_message_is_given_to_nobody_before_it_is_durable(rig: Rig) -> None:
    rig.send(b"before")
    assert rig.pull().bodies == [b"before"]
    frame = parse_message_frame(make_frame([b"written"]))
    rig.store.append([frame])
    assert rig.pull().bodies == []
    rig.store.commit_and_step()
    assert rig.pull().bodies == [b"written"]


def test_B2_a_waiting_pull_is_woken_by_the_commit_once(rig: Rig) -> None:
    woken: list[str] = []
    waiting = rig.broker.delivery.waiting
    waiting.add((SUBJECT, "one"), lambda: woken.append("one"))
    waiting.add((SUBJECT, "two"), lambda: woken.append("two"))
    waiting.add((SUBJECT, "one"), lambda: woken.append("one again"))
    waiting.add(("other", "one"), lambda: woken.append("other"))
    rig.submit(make_frame([b"a", b"b"]))
    assert woken == []
    rig.broker.writer.step()
    rig.run_posted()
    assert woken == ["one", "two"]
    assert waiting.count == 2


def test_a_pull_that_leaves_messages_wakes_the_next_one(rig: Rig) -> None:
    rig.send(b"a", b"b")
    woken: list[str] = []
    rig.broker.delivery.waiting.add((SUBJECT, "billing"), lambda: woken.append("next"))
    rig.pull(max_messages=2)
    assert woken == []
    rig.send(b"c", b"d")
    assert woken == ["next"]
    rig.broker.delivery.waiting.add((SUBJECT, "billing"), lambda: woken.append("again"))
    rig.pull(max_messages=1)
    assert woken == ["next", "again"]


def test_a_redelivery_wakes_a_waiting_pull_when_it_is_due(rig: Rig) -> None:
    rig.send(b"a")
    rig.settle(rig.pull().nack(delay_ms=5_000))
    assert rig.pull("two").bodies == []
    woken: list[str] = []
    rig.broker.delivery.waiting.add((SUBJECT, "billing"), lambda: woken.append("due"))
    rig.pass_ms(4_999)
    assert woken == []
    rig.pass_ms(1)
    assert woken == ["due"]


def test_a_repeated_request_is_answered_with_its_first_place(rig: Rig) -> None:
    frame = make_frame([b"a", b"b"])
    first = rig.submit(frame)
    rig.broker.writer.step()
    second = rig.submit(frame)
    rig.broker.writer.step()
    rig.run_posted()
    (placed,), (repeated,) = first, second
    assert isinstance(placed, Placed)
    assert isinstance(repeated, Placed)
    assert (placed.duplicates, repeated.duplicates) == (0, 2)
    assert rig.pull().bodies == [b"a", b"b"]


def test_an_id_with_other_content_is_refused_and_its_neighbours_continue(rig: Rig) -> None:
    rig.submit(make_frame([b"first"], ids=new_ids(1)))
    rig.broker.writer.step()
    outcomes = [
        rig.submit(make_frame([b"other"], ids=new_ids(1))),
        rig.submit(make_frame([b"good"], ids=new_ids(2))),
    ]
    rig.broker.writer.step()
    rig.run_posted()
    (refused,), (placed,) = outcomes
    assert isinstance(refused, ConflictError)
    assert refused.message_id == next(new_ids(1)).hex()
    assert isinstance(placed, Placed)
    assert rig.pull().bodies == [b"first", b"good"]


def test_B10_too_many_bytes_waiting_for_the_disk_are_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data", limits=ServiceLimits(commit_queue_bytes=2_000))
    for _ in range(3):
        rig.submit(make_frame([b"x" * 700]))
        rig.submit(make_frame([b"x" * 700]))
        with pytest.raises(BusyError, match="bytes wait for the disk"):
            rig.submit(make_frame([b"y" * 700]))
        rig.broker.writer.step()
        rig.run_posted()
    assert len(rig.pull().bodies) == 6
    rig.close()


def test_B10_a_disk_that_hangs_is_not_asked_for_more(rig: Rig) -> None:
    waiting = rig.submit(make_frame([b"a"]))
    rig.clock.pass_ms(1_001)
    with pytest.raises(BusyError, match="has waited 1001 ms"):
        rig.submit(make_frame([b"b"]))
    rig.broker.writer.step()
    rig.run_posted()
    assert isinstance(waiting[0], Placed)
    rig.submit(make_frame([b"b"]))


class BrokenStore:
    """Fails at one call."""

    def __init__(self, rig: Rig, call: str, error: Exception) -> None:
        self._rig, self._call, self._error = rig, call, error
        self.refusals = rig.store.refusals
        rig.broker.writer._store = self  # type: ignore[assignment]  # in its place

    def append(self, frames: list[MessageFrame]) -> list[Placed]:
        if self._call == "append":
            raise self._error
        return self._rig.store.append(frames)

    def commit(self) -> None:
        raise self._error

    def step(self) -> bool:
        return False


@pytest.mark.parametrize("call", ["append", "commit"])
@pytest.mark.parametrize("error", [PoisonedError("no more"), OSError("gone"), AssertionError()])
def test_a_failed_write_or_sync_tells_everybody_and_ends_the_broker(
    rig: Rig, call: str, error: Exception
) -> None:
    ended: list[str] = []
    rig.broker.on_end = lambda: ended.append("end")
    BrokenStore(rig, call, error)
    outcomes = [rig.submit(make_frame([b"a"])), rig.submit(make_frame([b"b"]))]
    rig.broker.writer.step()
    with pytest.raises(PoisonedError):  # the loop was not told yet
        rig.submit(make_frame([b"c"]))
    rig.run_posted()
    assert all(isinstance(outcome, PoisonedError) for (outcome,) in outcomes)
    assert ended == ["end"]
    assert rig.broker.serving.state is Serving.POISONED
    with pytest.raises(UnavailableError, match="poisoned"):
        rig.submit(make_frame([b"c"]))


def test_B5_who_waits_for_a_cancellation_learns_it_as_well(rig: Rig) -> None:
    BrokenStore(rig, "append", OSError("gone"))
    rig.submit(make_frame([b"a"]))
    rig.broker.writer.step()
    told: list[object] = []
    rig.broker.delayed.changes.cancel([], told.append)
    rig.broker.writer.step()
    rig.run_posted()
    assert [type(one) for one in told] == [PoisonedError]


def test_B6_a_full_disk_refuses_the_request_and_ends_nothing(rig: Rig) -> None:
    BrokenStore(rig, "append", DiskFullError("no room"))
    (outcome,) = _step(rig, make_frame([b"a"]))
    assert isinstance(outcome, DiskFullError)
    rig.broker.writer._store = rig.store
    (outcome,) = _step(rig, make_frame([b"b"]))
    assert isinstance(outcome, Placed)


def test_two_tasks_at_once_are_both_done_without_a_wait_between(rig: Rig) -> None:
    done: list[str] = []
    rig.broker.writer.run_soon(lambda: done.append("first"))
    rig.broker.writer.run_soon(lambda: done.append("second"))
    rig.broker.writer.step(wait_s=FOR_EVER_S)
    assert done == ["first"]
    rig.broker.writer.step(wait_s=FOR_EVER_S)
    assert done == ["first", "second"]


def test_what_is_to_be_done_at_a_stop_is_done_first(rig: Rig) -> None:
    done: list[str] = []
    for name in ("first", "second", "third"):
        rig.broker.writer.run_soon(partial(done.append, name))
    rig.broker.writer.stop()
    assert rig.broker.writer.step(wait_s=FOR_EVER_S).is_stopped
    assert done == ["first", "second", "third"]


def _step(rig: Rig, frame: bytes) -> list[Placed | Exception]:
    outcomes = rig.submit(frame)
    rig.broker.writer.step()
    rig.run_posted()
    return outcomes


def _places_of(call: str, calls: Sequence[str]) -> list[int]:
    return [place for place, other in enumerate(calls) if other == call]
