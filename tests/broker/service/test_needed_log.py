"""What retention asks of ten thousand groups each second: of one, as long as that one is in the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qmq_broker.errors import DiskFullError
from qmq_broker.service.delivery import needed_log
from qmq_broker.service.delivery.needed_log import first_needed
from qmq_broker.service.housekeeping import INTERVAL_MS
from qmq_broker.storage.keepers import LogOffsets
from qmq_broker.storage.queues import consume_queues
from qmq_client.group.state import GroupState
from qmq_client.wire.start import parse_start
from tests.broker.service.retaining import (
    HOUR_MS,
    LONG_MS,
    RETAINING,
    first_sequence,
    keep_house,
    send,
    with_options,
)
from tests.broker.service.rig import SUBJECT, Rig

OTHERS = [f"group-{number}" for number in range(10)]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "data", store_options=RETAINING)
    yield made
    made.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The groups that were asked what they need."""
    groups: list[str] = []

    def note(state: GroupState, dead_since_ms: int, first_sequence: int) -> int:
        groups.append(state.group)
        return first_needed(state, dead_since_ms, first_sequence)

    monkeypatch.setattr(needed_log, "first_needed", note)
    return groups


def no_room(*_: object) -> None:
    raise DiskFullError("no space left")


def look(rig: Rig, asked: list[str]) -> list[str]:
    """Who is asked by the next look at what may go."""
    asked.clear()
    rig.clock.pass_ms(INTERVAL_MS)
    rig.broker.step()
    rig.broker.writer.step()
    return list(asked)


def test_B12_while_one_group_is_in_the_way_no_other_is_asked(rig: Rig, asked: list[str]) -> None:
    send(rig, 20)
    held = rig.pull("slow", group="behind", lease_ms=LONG_MS)
    for group in OTHERS:
        rig.settle(rig.pull(group=group).ack(), group=group)
    rig.clock.pass_ms(HOUR_MS)
    assert look(rig, asked) == ["behind", *OTHERS]
    assert [look(rig, asked) for _ in range(5)] == 5 * [["behind"]]
    assert rig.store.first_offset == 0
    rig.settle(held.ack(), "slow", group="behind")
    assert look(rig, asked) == ["behind", "behind", *OTHERS]
    for _ in range(3):
        look(rig, asked)
    assert rig.store.first_offset > 0


def test_B12_when_the_group_in_the_way_is_removed_the_next_one_is_found(
    rig: Rig, asked: list[str]
) -> None:
    send(rig, 20)
    for group in ("first", "second"):
        rig.pull("slow", group=group, lease_ms=LONG_MS)
    rig.clock.pass_ms(HOUR_MS)
    assert look(rig, asked) == ["first", "second"]
    rig.broker.changes.remove(SUBJECT, "first", rig.now_ms)
    assert look(rig, asked) == ["second"]
    rig.broker.changes.remove(SUBJECT, "second", rig.now_ms)
    assert look(rig, asked) == []
    look(rig, asked)
    assert rig.store.first_offset > 0


def test_B12_a_group_that_is_moved_back_is_asked_before_anything_goes(
    rig: Rig, asked: list[str]
) -> None:
    send(rig, 20)
    held = rig.pull("slow", group="behind", lease_ms=LONG_MS)
    done = rig.pull(group="done")
    rig.settle(done.ack(), group="done")
    rig.clock.pass_ms(HOUR_MS)
    assert look(rig, asked) == ["behind", "done"]
    rig.settle(held.ack(), "slow", group="behind")
    rig.broker.changes.seek(SUBJECT, "done", parse_start("sequence:0"), rig.now_ms)
    assert look(rig, asked) == ["behind", "behind", "done"]
    assert look(rig, asked) == ["done"]
    assert rig.store.first_offset == 0


def test_B12_while_ids_that_may_be_repeated_hold_the_log_no_group_is_asked(
    rig: Rig, asked: list[str]
) -> None:
    with_options(rig, dedupe_ids=1_000_000, dedupe_ms=4 * HOUR_MS)
    send(rig, 20)
    for group in OTHERS:
        rig.settle(rig.pull(group=group).ack(), group=group)
    rig.clock.pass_ms(HOUR_MS)
    assert [look(rig, asked) for _ in range(5)] == 5 * [[]]
    for _ in range(9):  # a window forgets an eighth at a time, when something is stored
        rig.clock.pass_ms(HOUR_MS)
        send(rig, 1)
    for group in OTHERS:
        rig.settle(rig.pull(group=group).ack(), group=group)
    assert look(rig, asked) == OTHERS
    for _ in range(3):
        look(rig, asked)
    assert rig.store.first_offset > 0


def test_B12_while_a_keeper_is_inside_the_first_segment_no_group_is_asked(
    rig: Rig, asked: list[str]
) -> None:
    send(rig, 20)
    rig.settle(rig.pull().ack())
    rig.store.keep("archive", LogOffsets(1_000, 0), rig.now_ms)
    rig.clock.pass_ms(HOUR_MS)
    assert [look(rig, asked) for _ in range(5)] == 5 * [[]]


def test_B12_while_a_full_disk_keeps_queues_from_being_saved_no_group_is_asked_again(
    rig: Rig, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_options(rig, queue_flush_bytes=1024**3)
    send(rig, 20)
    for group in OTHERS:
        rig.settle(rig.pull(group=group).ack(), group=group)
    rig.clock.pass_ms(HOUR_MS)
    with monkeypatch.context() as full:
        full.setattr(consume_queues, "write_queue_table", no_room)
        assert look(rig, asked) == OTHERS
        assert [look(rig, asked) for _ in range(5)] == 5 * [[]]
    for _ in range(3):
        look(rig, asked)
    assert rig.store.first_offset > 0


@pytest.mark.parametrize("lost", ["not reached", "given back", "dead", "in flight"])
@pytest.mark.parametrize("group", ["lost some", "another"])
def test_B12_what_a_loss_by_force_has_left_is_kept_for_every_group(
    rig: Rig, lost: str, group: str
) -> None:
    with_options(rig, force_retention=True)
    send(rig, 4)
    first = rig.pull(group="lost-some", max_messages=1, lease_ms=LONG_MS)
    if lost in ("given back", "dead"):
        outcome = first.nack(delay_ms=HOUR_MS // 2) if lost == "given back" else first.reject()
        rig.settle(outcome, group="lost-some")
    send(rig, 16)
    begun = rig.pull(group="another", max_messages=1)
    rig.settle(begun.ack(), group="another")
    if group == "another" and lost != "not reached":
        rest = rig.pull("two", group="lost-some", max_messages=100)
        rig.settle(rest.ack(), "two", group="lost-some")
    keep_house(rig, ms=61_000)
    left = first_sequence(rig)
    assert left > 4
    with_options(rig, force_retention=False)
    send(rig, 20)
    keep_house(rig)
    assert first_sequence(rig) == left
    name = "another" if group == "another" else "lost-some"
    assert rig.pull("three", group=name, max_messages=100).sequences == list(range(left, 40))
