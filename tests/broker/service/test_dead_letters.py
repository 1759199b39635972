"""Dead letters: their history, and what is done with them, to their own group only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from qmq_broker.errors import DiskError, NotFoundError
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.storage.files.letters import LetterPage
from qmq_client.group import dead_letters
from qmq_client.group import history as history_module
from qmq_client.group.actions import Action
from qmq_client.group.history import ATTEMPTS_KEPT_MAX, Attempt, History, extended, kept_of_each
from qmq_client.wire.operations import DeadAnswer, DeadRequest
from qmq_client.wire.requests import Nack, Settlement
from tests.broker.service.rig import GROUP, SUBJECT, Rig


def replay(rig: Rig, **range_: int) -> DeadAnswer:
    request = DeadRequest(subject=SUBJECT, group=GROUP, **range_)
    return rig.broker.changes.replay(request, rig.now_ms)


def purge(rig: Rig, **range_: int) -> DeadAnswer:
    request = DeadRequest(subject=SUBJECT, group=GROUP, **range_)
    return rig.broker.changes.purge(request, rig.now_ms)


def test_C4_a_dead_letter_says_what_was_tried_by_whom_and_how_it_ended(rig: Rig) -> None:
    rig.send(b"a", b"b")
    began_ms = rig.now_ms
    rig.pull("one", lease_ms=1_000)
    rig.pass_ms(1_000)
    rig.pass_ms(1_000)
    second = rig.pull("two")
    rig.pass_ms(10)
    rig.settle(second.nack(delay_ms=0, error="ValueError: b"), "two")
    rig.restart()
    rig.settle(rig.pull("three", max_messages=1).reject("not ours"), "three")
    (letter,) = rig.broker.query.dead_letters(SUBJECT, GROUP)
    told = [(one.attempt, one.consumer, one.outcome, one.error) for one in letter.history]
    assert told == [
        (1, "one", "lease ended", "lease ended"),
        (2, "two", "nacked", "ValueError: b"),
        (3, "three", "rejected", "not ours"),
    ]
    times = [(one.given_at_ms - began_ms, one.ended_at_ms - began_ms) for one in letter.history]
    assert times == [(0, 1_000), (2_000, 2_010), (2_010, 2_010)]
    offset, content = rig.broker.delivery.snapshot(rig.now_ms)
    rig.store.actions.write_snapshot(offset, content())
    rig.restart()
    assert rig.broker.query.dead_letters(SUBJECT, GROUP) == [letter]
    (waiting,) = rig.broker.query.in_groups(SUBJECT, 1, b"", rig.now_ms)
    assert [one.outcome for one in waiting.history] == ["lease ended", "nacked"]


def test_C4_replayed_dead_letters_go_to_their_own_group_as_if_for_the_first_time(
    rig: Rig,
) -> None:
    rig.send(b"a", b"b", b"c")
    for group in (GROUP, "other"):
        given = rig.pull(group=group)
        rig.settle(given.reject("no"), group=group)
    assert replay(rig, first=1) == DeadAnswer(count=2)
    rig.restart()
    again = rig.pull()
    assert (again.bodies, again.attempts) == ([b"b", b"c"], [1, 1])
    assert rig.pull(group="other").bodies == []
    rig.settle(again.reject("still no"))
    letters = rig.broker.query.dead_letters(SUBJECT, GROUP)
    assert [one.sequence for one in letters] == [0, 1, 2]
    assert [len(one.history) for one in letters] == [1, 2, 2]


def test_C4_purged_dead_letters_are_gone_for_good(rig: Rig) -> None:
    rig.send(b"a", b"b", b"c")
    rig.settle(rig.pull().reject("no"))
    assert purge(rig, first=0, next=2) == DeadAnswer(count=2)
    rig.restart()
    assert [one.sequence for one in rig.broker.query.dead_letters(SUBJECT, GROUP)] == [2]
    assert rig.pull().bodies == []
    assert purge(rig) == DeadAnswer(count=1)
    assert purge(rig) == DeadAnswer(count=0)


def test_B10_one_request_takes_a_bounded_number_and_says_that_there_is_more(
    tmp_path: Path,
) -> None:
    limits = ServiceLimits(dead_letters_per_request=2, unsettled_per_group=5)
    rig = Rig(tmp_path / "data", limits=limits)
    rig.send(b"a", b"b", b"c", b"d", b"e")
    rig.settle(rig.pull().reject("no"))
    assert replay(rig) == DeadAnswer(count=2, has_more=True)
    assert purge(rig) == DeadAnswer(count=2, has_more=True)
    assert replay(rig) == DeadAnswer(count=1)
    assert rig.pull().bodies == [b"a", b"b", b"e"]
    rig.close()


def test_C4_scattered_dead_letters_are_replayed_all_and_once(rig: Rig) -> None:
    rig.send(*[b"%d" % number for number in range(900)])
    given = rig.pull(max_messages=900)
    rig.settle(given.ack(*[given.part(n) for n in range(0, 300, 3)]))
    rig.pass_ms(30_000)
    rest = [n for n in range(900) if n >= 300 or n % 3]
    rig.pass_ms(1_000)
    again = rig.pull(max_messages=900)
    assert sorted(again.sequences) == rest
    rig.settle(again.reject("no"))
    assert replay(rig, first=100) == DeadAnswer(count=len([n for n in rest if n >= 100]))
    rig.restart()
    replayed: list[int] = []
    while given_now := rig.pull(max_messages=900).sequences:  # some hundred runs at a time
        replayed += given_now
    assert replayed == [n for n in rest if n >= 100]


@pytest.mark.parametrize("change", [replay, purge])
def test_B10_pages_that_a_change_needs_are_read_before_it_is_logged(
    change: Callable[..., DeadAnswer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "BLOCK_LETTERS_MAX", 5)
    rig = Rig(tmp_path, limits=ServiceLimits(dead_letters_memory_bytes=1))
    for _ in range(20):
        rig.send(*[b"x"] * 20)
        rig.settle(rig.pull().reject("no"))
    append = rig.store.actions.append
    is_logged: list[Sequence[Action]] = []

    def log(actions: Sequence[Action]) -> None:
        append(actions)
        is_logged.append(actions)

    def read(page: LetterPage) -> bytes:
        if is_logged:
            raise DiskError(operation="read", path=page.path, reason="too late")
        return read_page(page)

    read_page = LetterPage.read
    monkeypatch.setattr(LetterPage, "read", read)
    with monkeypatch.context() as watched:
        watched.setattr(rig.store.actions, "append", log)
        assert change(rig, first=3, next=398) == DeadAnswer(count=395)
    assert is_logged.pop()
    left = [one.sequence for one in rig.broker.query.dead_letters(SUBJECT, GROUP)]
    assert left == [0, 1, 2, 398, 399]
    assert rig.broker.room.status().dead_letters.memory_bytes < 1_000
    rig.restart()
    assert len(rig.pull(max_messages=1_000).bodies) == (395 if change is replay else 0)


@pytest.mark.parametrize("change", [replay, purge])
def test_B10_a_page_that_cannot_be_read_refuses_a_change_and_changes_nothing(
    change: Callable[..., DeadAnswer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "BLOCK_LETTERS_MAX", 5)
    rig = Rig(tmp_path, limits=ServiceLimits(dead_letters_memory_bytes=1))
    rig.send(*[b"x"] * 20)
    rig.settle(rig.pull().reject("no"))
    with monkeypatch.context() as broken:
        broken.setattr(LetterPage, "read", raiser)
        with pytest.raises(DiskError):
            change(rig, first=3, next=18)
    assert len(rig.broker.query.dead_letters(SUBJECT, GROUP)) == 20
    assert change(rig, first=3, next=18) == DeadAnswer(count=15)


def raiser(page: LetterPage) -> bytes:
    raise DiskError(operation="read", path=page.path, reason="bad sector")


def test_dead_letters_of_nobody_are_reported(rig: Rig) -> None:
    for change in (replay, purge):
        with pytest.raises(NotFoundError):
            change(rig)


def test_dead_letters_are_listed_with_their_messages_when_asked_for(rig: Rig) -> None:
    rig.send(b"a", b"b")
    rig.settle(rig.pull().reject("no"))
    assert [one.record for one in rig.broker.query.dead_letters(SUBJECT, GROUP)] == [None, None]
    listed = rig.broker.query.dead_letters(SUBJECT, GROUP, records_bytes=1_000_000)
    assert [one.record[-1:] for one in listed if one.record] == [b"a", b"b"]


def test_B10_a_group_where_very_many_messages_fail_keeps_less_of_each(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "ATTEMPTS_PER_GROUP", 60)
    rig.send(*[b"%d" % number for number in range(20)])
    for _ in range(5):
        given = rig.pull(max_messages=20)
        for index in range(20):
            nack = Nack(range=given.part(index), delay_ms=0, error="x")
            rig.settle(Settlement(token=given.token, nacks=(nack,)))
    state = rig.broker.delivery.group(SUBJECT, GROUP)
    assert state is not None
    runs = list(state.redeliveries.runs())
    assert [(run.attempts, len(run.history)) for run in runs] == [(5, 3)] * 20
    assert [one.attempt for one in runs[0].history] == [3, 4, 5]
    assert [kept_of_each(count) for count in (0, 1, 5, 30, 61)] == [16, 16, 12, 2, 0]


def test_B10_a_history_is_bounded_and_keeps_the_newest() -> None:
    history: History = ()
    for number in range(1, 40):
        history = extended(history, Attempt(number, "one", number, number, "nacked", "x" * 500))
    assert [one.attempt for one in history] == list(range(40 - ATTEMPTS_KEPT_MAX, 40))
    assert [len(one.error) for one in history] == [100] * (ATTEMPTS_KEPT_MAX - 1) + [500]
