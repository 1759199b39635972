"""B10: what callers bring into being has a bound over all groups, and is counted as what it takes."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from qmq_broker.errors import BusyError
from qmq_broker.face.routes.hot import without_settlements
from qmq_broker.service.limits import ServiceLimits
from qmq_client.group.dead_letters import BLOCK_BYTES_MAX
from qmq_client.wire.requests import Backoff, Nack, PullRequest, Reject, Settlement, Tags
from tests.broker.service.rig import GROUP, SUBJECT, Given, Rig, make_frame

COUNT: Final = 2_000
#: 500 characters of four bytes each.
LONG_ERROR: Final = "\U0001f600" * 500
MIB: Final = 1024 * 1024
SLOW: Final = Backoff(first_ms=600_000, factor=1.0, max_ms=600_000)
LIMITS: Final = ServiceLimits(consumers_per_group=2 * COUNT)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "rig", limits=LIMITS)
    yield made
    made.close()


def fill(rig: Rig, count: int = COUNT, **fields: Any) -> None:
    rig.submit(make_frame([b"x"] * count, **fields))
    rig.broker.writer.step()
    rig.run_posted()


def one_by_one(given: Given, error: str) -> Settlement:
    count = given.next - given.first
    parts = [given.part(index) for index in range(count)]
    return Settlement(
        token=given.token, nacks=tuple(Nack(range=part, error=error) for part in parts)
    )


def groups(rig: Rig) -> None:
    for number in range(COUNT // 4):
        rig.pull(
            subject="few",
            group=f"group-{number}",
            tags=Tags(any=tuple(f"t{n}{'x' * 60}" for n in range(64))),
        )


def consumers(rig: Rig) -> None:
    for number in range(COUNT):
        rig.settle(rig.pull(f"consumer-{number}", max_messages=1).ack(), f"consumer-{number}")


def leases(rig: Rig) -> None:
    for _ in range(COUNT):
        rig.pull(max_messages=1)


def redeliveries(rig: Rig) -> None:
    rig.settle(one_by_one(rig.pull(max_messages=COUNT), LONG_ERROR))


def histories(rig: Rig) -> None:
    for _ in range(4):
        rig.settle(one_by_one(rig.pull(max_messages=COUNT), "an error of " + "twenty letters" * 10))
        rig.pass_ms(600_000)


def rejected(rig: Rig) -> None:
    given = rig.pull(max_messages=COUNT)
    parts = [given.part(index) for index in range(given.next - given.first)]
    rejects = tuple(Reject(range=part, reason=LONG_ERROR) for part in parts)
    rig.settle(Settlement(token=given.token, rejects=rejects))


def attempts_used_up(rig: Rig) -> None:
    rig.settle(rig.pull(max_messages=COUNT, max_attempts=1).nack(error="no"))


def acked_in_pieces(rig: Rig) -> None:
    given = rig.pull(max_messages=COUNT)
    rig.settle(given.ack(*[given.part(index) for index in range(0, COUNT, 2)]))


def keyed(rig: Rig) -> None:
    for number in range(COUNT // 100):
        records = make_frame([b"x"] * 100, subject="keyed", key=f"key {number}")
        rig.submit(records)
    rig.broker.writer.step()
    rig.run_posted()
    rig.pull(subject="keyed", ordered=True, max_messages=COUNT)


#: What a caller does, and how many times its memory it may be counted as.
MADE: Final[dict[str, tuple[Callable[[Rig], None], float]]] = {
    "groups": (groups, 3.0),
    "consumers": (consumers, 3.0),
    "leases": (leases, 3.0),
    "redeliveries": (redeliveries, 3.0),
    "histories": (histories, 3.0),
    "rejected": (rejected, 3.0),
    "attempts used up": (attempts_used_up, 3.0),
    "acked in pieces": (acked_in_pieces, 10.0),
    "keyed": (keyed, 10.0),
}


@pytest.mark.parametrize("kind", MADE)
def test_B10_what_is_made_is_counted_as_the_memory_it_takes(
    rig: Rig, tmp_path: Path, kind: str
) -> None:
    make, factor_max = MADE[kind]
    warm = Rig(tmp_path / "warm", limits=LIMITS)  # what is loaded late is no part of it
    fill(warm)
    make(warm)
    warm.close()
    del warm
    fill(rig)
    rig.pull("first", group="first", max_messages=1)
    rig.broker.delivery.journal.dead_letter_digest.take(0.0)
    before = rig.broker.delivery.budget.memory_bytes
    gc.collect()
    tracemalloc.start()
    make(rig)
    gc.collect()
    taken_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    counted_bytes = rig.broker.delivery.budget.memory_bytes - before
    assert taken_bytes <= counted_bytes <= factor_max * taken_bytes


def until_refused(ask: Callable[[int], object]) -> BusyError:
    """Ask again and again; why that was refused in the end."""
    for number in range(10_000):
        try:
            ask(number)
        except BusyError as refused:
            return refused
    raise AssertionError("never refused")


def bounded(directory: Path, **limits: int) -> Rig:
    return Rig(directory, limits=ServiceLimits(groups_bytes=MIB, **limits))


#: What one more request makes of it, with the number of the request.
ONE_MORE: Final[dict[str, Callable[[Rig, int], object]]] = {
    "groups": lambda rig, n: rig.pull(group=f"group-{n}"),
    "consumers": lambda rig, n: rig.pull(f"consumer-{n}", max_messages=1),
    "leases": lambda rig, n: rig.pull(max_messages=1),
    "in flight": lambda rig, n: rig.pull(max_messages=50),
    "given back": lambda rig, n: rig.settle(
        one_by_one(rig.pull(max_messages=50, backoff=SLOW), LONG_ERROR)
    ),
    "rejected": lambda rig, n: rig.settle(rig.pull(max_messages=50).reject(LONG_ERROR)),
    "acked in pieces": lambda rig, n: rig.settle(
        (given := rig.pull(f"c{n}", max_messages=50)).ack(
            *[given.part(i) for i in range(0, 50, 2)]
        ),
        f"c{n}",
    ),
    "groups of rejected": lambda rig, n: rig.settle(
        rig.pull(group=f"g{n}", max_messages=50).reject(), group=f"g{n}"
    ),
}


def test_B10_a_pull_that_is_refused_for_the_memory_of_its_group_makes_none(tmp_path: Path) -> None:
    rig = Rig(tmp_path, limits=ServiceLimits(groups_bytes=20_000))
    rig.send(b"x")
    made = 0
    while rig.broker.delivery.budget.memory_bytes < 14_000:
        rig.pull(group=f"g{made}")
        made += 1
    with pytest.raises(BusyError, match="the memory of all groups"):
        rig.pull(group="another")
    assert len(rig.broker.query.groups()) == made
    rig.restart()
    assert len(rig.broker.query.groups()) == made
    rig.close()


@pytest.mark.parametrize("kind", ONE_MORE)
def test_B10_whatever_piles_up_is_refused_at_the_bound_over_all_groups(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = bounded(tmp_path)
    fill(rig, 10_000)
    if "rejected" in kind:  # else they go to files
        monkeypatch.setattr(rig.store.disk, "free_bytes", lambda: 0)
    said = until_refused(partial(ONE_MORE[kind], rig))
    assert said.field == "memory of all groups"
    assert said.limit == f"{MIB} bytes"
    assert "dead letters" in said.remedy
    assert said.retry_after_s > 0
    budget = rig.broker.delivery.budget
    assert 0.99 * MIB <= budget.memory_bytes < 1.5 * MIB
    rig.pass_ms(24 * 3_600_000)  # all leases end: that takes no more than was counted
    assert budget.memory_bytes < 1.5 * MIB
    rig.restart()
    assert rig.broker.delivery.budget.memory_bytes < 1.5 * MIB
    rig.close()


def test_B10_beyond_the_bound_a_group_gets_what_it_had_and_then_new_messages_again(
    tmp_path: Path,
) -> None:
    rig = bounded(tmp_path)
    fill(rig, 10_000)
    rig.settle(one_by_one(rig.pull(max_messages=1_000), "e"))
    until_refused(lambda _: rig.pull("two", group="other", max_messages=100, lease_ms=3_600_000))
    rig.pass_ms(600_000)
    given = rig.pull(max_messages=100)
    assert given.attempts == [2] * 100
    rig.settle(given.ack())
    assert rig.broker.delivery.budget.memory_bytes < MIB
    assert 1 in rig.pull(max_messages=100).attempts
    rig.close()


def test_B10_an_ordered_group_waits_at_the_bound_without_going_round(tmp_path: Path) -> None:
    rig = bounded(tmp_path)
    fill(rig, 10_000, key="one")
    given = rig.pull(ordered=True, max_messages=1)
    until_refused(lambda _: rig.pull("two", group="g", max_messages=100))
    request = PullRequest(subject=SUBJECT, group=GROUP, consumer="one", ordered=True)
    with pytest.raises(BusyError):
        rig.broker.delivery.pull(request, rig.now_ms)
    assert not rig.broker.delivery.step(rig.now_ms).is_unfinished
    rig.settle(given.ack())
    assert rig.pull(ordered=True).bodies == [b"x"]
    rig.close()


def reject_as(rig: Rig, owner: str, group: str) -> None:
    """Pull 100 messages for a group of this token, and reject them with long reasons."""
    request = PullRequest(subject=SUBJECT, group=group, consumer="one", max_messages=100)
    answer = rig.broker.delivery.pull(request, rig.now_ms, owner=owner)
    assert answer is not None
    rig.settle(Given(answer).reject(LONG_ERROR), group=group)


def test_B10_dead_letters_far_beyond_the_bound_of_the_memory_are_in_files(tmp_path: Path) -> None:
    rig = bounded(tmp_path)
    fill(rig, 10_000)
    for _ in range(100):
        reject_as(rig, "", GROUP)
    budget, room = rig.broker.delivery.budget, rig.broker.room
    assert budget.dead_letters_bytes > 15 * MIB
    assert budget.memory_bytes < 0.9 * MIB
    told = room.status().dead_letters
    assert told.letters == 10_000
    assert 0 < told.memory_bytes <= told.memory_bytes_max + 2 * BLOCK_BYTES_MAX
    assert told.file_bytes > 15 * MIB
    letters = rig.broker.query.dead_letters(SUBJECT, GROUP, first_sequence=5_000, count=10)
    assert [one.sequence for one in letters] == list(range(5_000, 5_010))
    assert {one.error for one in letters} == {LONG_ERROR}
    rig.broker.changes.remove(SUBJECT, GROUP, rig.now_ms)
    while rig.broker.room.status().dead_letters.file_bytes:
        rig.broker.delivery.step(rig.now_ms)
    assert not list((tmp_path / "letters").iterdir())
    rig.close()


def test_B10_a_disk_that_was_full_takes_dead_letters_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = bounded(tmp_path)
    fill(rig, 10_000)
    with monkeypatch.context() as full:
        full.setattr(rig.store.disk, "free_bytes", lambda: 0)
        until_refused(lambda _: reject_as(rig, "", GROUP))
        assert not rig.broker.room.status().dead_letters.file_bytes
        count = len(rig.broker.query.dead_letters(SUBJECT, GROUP, count=10_000))
    rig.pass_ms(1_000)
    assert rig.broker.delivery.budget.memory_bytes < MIB
    reject_as(rig, "", GROUP)
    letters = rig.broker.query.dead_letters(SUBJECT, GROUP, count=10_000)
    assert len(letters) == count + 100
    rig.close()


def test_B10_the_length_of_all_dead_letters_has_a_bound_and_one_for_each_token(
    tmp_path: Path,
) -> None:
    bounds = {"dead_letters_bytes": 2 * MIB, "dead_letters_bytes_per_token": MIB}
    rig = Rig(tmp_path, limits=ServiceLimits(**bounds))
    fill(rig, 10_000)
    said = until_refused(lambda _: reject_as(rig, "greedy", "g"))
    assert said.field == "length of the dead letters of token greedy"
    reject_as(rig, "modest", "m")
    said = until_refused(lambda _: reject_as(rig, "", "o"))
    assert said.field == "length of all dead letters"
    rig.restart()
    with pytest.raises(BusyError, match="length of all dead letters"):
        reject_as(rig, "modest", "m")
    rig.broker.changes.remove(SUBJECT, "g", rig.now_ms)
    reject_as(rig, "modest", "m")
    rig.close()


def pull_as(rig: Rig, owner: str, group: str) -> None:
    request = PullRequest(subject=SUBJECT, group=group, consumer="c", max_messages=100)
    rig.broker.delivery.begin_pull(request, rig.now_ms)
    rig.broker.delivery.pull(request, rig.now_ms, owner=owner)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_B10_one_token_leaves_room_for_the_groups_of_others(
    tmp_path: Path, is_restarted: bool
) -> None:
    rig = Rig(tmp_path, limits=ServiceLimits(groups=10, groups_per_token=4))
    fill(rig, 1)
    for number in range(4):
        pull_as(rig, "greedy", f"g{number}")
    if is_restarted:
        rig.restart()
    with pytest.raises(BusyError) as refused:
        pull_as(rig, "greedy", "g4")
    assert refused.value.field == "groups made by token greedy"
    assert refused.value.limit == "4"
    assert "qmq groups remove" in refused.value.remedy
    pull_as(rig, "greedy", "g0")
    for number in range(4):
        pull_as(rig, "modest", f"m{number}")
    pull_as(rig, "", "operators")
    rig.broker.changes.remove(SUBJECT, "g0", rig.now_ms)
    pull_as(rig, "greedy", "g4")
    pull_as(rig, "", "tenth")
    with pytest.raises(BusyError) as refused:
        pull_as(rig, "", "eleventh")
    assert refused.value.field == "groups"
    rig.close()


@pytest.mark.parametrize("is_restarted", [False, True])
def test_B10_one_token_leaves_memory_to_the_groups_of_others(
    tmp_path: Path, is_restarted: bool
) -> None:
    rig = bounded(tmp_path, groups_bytes_per_token=MIB // 4)
    fill(rig, 10_000)
    said = until_refused(lambda number: pull_as(rig, "greedy", f"g{number % 2}"))
    assert said.field == "memory of the groups of token greedy"
    if is_restarted:
        rig.restart()
    with pytest.raises(BusyError):
        pull_as(rig, "greedy", "i")
    pull_as(rig, "modest", "m")
    rig.close()


@pytest.mark.parametrize("how", ["as it is", "restarted", "from a snapshot"])
def test_B10_one_token_leaves_room_for_the_subjects_of_others(tmp_path: Path, how: str) -> None:
    rig = Rig(tmp_path, limits=ServiceLimits(subjects=8, subjects_per_token=3))

    def send(owner: str, subject: str) -> None:
        rig.broker.send(make_frame([b"x"], subject=subject), lambda _: None, owner=owner)
        rig.broker.writer.step()
        rig.run_posted()

    for number in range(3):
        send("greedy", f"g{number}")
    if how == "from a snapshot":
        offset, content = rig.broker.delivery.snapshot(rig.now_ms)
        rig.store.actions.write_snapshot(offset, content())
    if how != "as it is":
        rig.restart()
    with pytest.raises(BusyError) as refused:
        send("greedy", "g3")
    assert refused.value.field == "subjects made by token greedy"
    assert "qmq subjects remove" in refused.value.remedy
    send("greedy", "g0")
    send("modest", "m0")
    for number in range(4):
        send("", f"o{number}")
    with pytest.raises(BusyError) as refused:
        send("", "o4")
    assert refused.value.field == "subjects"
    rig.close()


def test_B10_a_pull_that_waits_holds_none_of_its_settlements() -> None:
    settlement = Settlement(token=1, acks=((0, 1),))
    request = PullRequest(
        subject=SUBJECT, group=GROUP, consumer="c", wait_ms=1, settlements=(settlement,)
    )
    assert without_settlements(request) == msgspec.structs.replace(request, settlements=())


def test_C6_a_late_ack_for_a_group_that_was_removed_settles_nothing_of_a_new_one(rig: Rig) -> None:
    fill(rig, 3)
    late = rig.pull(max_messages=2)
    rig.broker.changes.remove(SUBJECT, GROUP, rig.now_ms)
    again = rig.pull(max_messages=2)
    assert again.sequences == late.sequences
    assert rig.settle(late.ack()).settled == 0
    assert rig.settle(again.ack()).settled == 2


def rss_mib() -> float:
    """What this process takes, by the system's own count."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB
