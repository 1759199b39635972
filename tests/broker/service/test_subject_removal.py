"""Subjects that nobody uses any more can be removed, and their sequences are never given again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from qmq_broker.errors import BusyError, NotEmptyError, NotFoundError
from qmq_broker.service.delivery.snapshot import check_groups
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.query import SubjectStatus
from qmq_broker.storage.files import retained
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.layout import queue_directory
from qmq_broker.storage.upkeep.rebuild import rebuild_store
from qmq_broker.storage.upkeep.verify import verify_store
from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.wire.errors import InvalidNameError
from qmq_client.wire.names import COPIES
from tests.broker.service.retaining import BODY, RETAINING, keep_house, send
from tests.broker.service.rig import SUBJECT, Rig, make_frame

OLD: Final = "orders.old"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, store_options=RETAINING)
    yield made
    made.close()


def remove(rig: Rig, subject: str = OLD) -> SubjectStatus:
    outcomes: list[SubjectStatus | Exception] = []
    rig.broker.subject_removal.remove(subject, rig.now_ms, outcomes.append)
    rig.broker.writer.step()
    rig.run_posted()
    (outcome,) = outcomes
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def make_empty(rig: Rig, subject: str = OLD, count: int = 3) -> None:
    """Messages that came and went."""
    send(rig, count, subject)
    send(rig, 12)
    keep_house(rig)
    send(rig, 12)
    keep_house(rig)
    queue = rig.store.queue(subject)
    assert queue is not None
    assert queue.first_sequence == queue.next_sequence


def listed(rig: Rig) -> list[str]:
    return [one.subject for one in rig.broker.query.subjects()]


def killed(rig: Rig) -> None:
    rig.kill()
    rig.start()


def rebuilt(rig: Rig) -> None:
    rig.close()
    disk = OsDisk(str(rig.directory))
    rebuild_store(disk, SYSTEM_CLOCK, with_index=True)
    disk.close()
    rig.start()


def given_up(rig: Rig) -> None:
    send(rig, 12)
    keep_house(rig)
    rig.restart()


AFTERWARDS: Final[dict[str, Callable[[Rig], None]]] = {
    "as it is": lambda _: None,
    "restarted": Rig.restart,
    "killed": killed,
    "rebuilt": rebuilt,
    "more was given up": given_up,
}


def verified(rig: Rig) -> None:
    rig.close()
    disk = OsDisk(str(rig.directory))
    found = verify_store(disk, SYSTEM_CLOCK, check_groups=check_groups)
    assert [fault for fault in found.faults if fault.level != "ignored"] == []
    assert (OLD in found.subjects) == (OLD in listed_names(disk))
    disk.close()
    rig.start()


def listed_names(disk: OsDisk) -> set[str]:
    return {OLD} if disk.names(queue_directory(OLD)) else set()


@pytest.mark.parametrize("then", AFTERWARDS)
def test_B12_a_removed_subject_is_gone_and_continues_where_it_ended(rig: Rig, then: str) -> None:
    make_empty(rig)
    assert remove(rig) == SubjectStatus(subject=OLD, first_sequence=3, next_sequence=3)
    assert listed(rig) == [SUBJECT]
    with pytest.raises(NotFoundError):
        remove(rig)
    AFTERWARDS[then](rig)
    assert listed(rig) == [SUBJECT]
    assert not (rig.directory / queue_directory(OLD)).exists() or not list(
        (rig.directory / queue_directory(OLD)).iterdir()
    )
    verified(rig)
    rig.send(b"again", subject=OLD)
    (Rig.restart if then == "more was given up" else AFTERWARDS[then])(rig)
    given = rig.pull(subject=OLD, group="new")
    assert (given.bodies, given.sequences) == ([b"again"], [3])
    rig.settle(given.ack(), subject=OLD, group="new")
    verified(rig)
    rig.broker.changes.remove(OLD, "new", rig.now_ms)
    make_empty(rig, count=1)
    assert remove(rig).next_sequence == 5
    killed(rig)
    assert listed(rig) == [SUBJECT]
    verified(rig)


def test_B10_what_is_still_used_is_not_removed(rig: Rig) -> None:
    with pytest.raises(NotFoundError):
        remove(rig)
    with pytest.raises(InvalidNameError):
        remove(rig, COPIES)
    send(rig, 1, OLD)
    with pytest.raises(NotEmptyError) as refused:
        remove(rig)
    assert (refused.value.field, refused.value.value) == ("messages", "1")
    make_empty(rig, count=1)
    rig.pull(subject=OLD)
    with pytest.raises(NotEmptyError) as refused:
        remove(rig)
    assert (refused.value.field, refused.value.value) == ("groups", "1")
    assert "remove" in refused.value.remedy.lower()
    assert OLD in listed(rig)


def test_B12_a_message_that_comes_first_keeps_the_subject(rig: Rig) -> None:
    make_empty(rig)
    outcomes: list[SubjectStatus | Exception] = []
    rig.broker.subject_removal.remove(OLD, rig.now_ms, outcomes.append)
    rig.broker.send(make_frame([b"first"], subject=OLD), lambda _: None)
    with pytest.raises(BusyError, match="being removed"):
        rig.pull(subject=OLD, group="new")
    rig.broker.writer.step()
    rig.run_posted()
    assert len(outcomes) == 1
    assert rig.pull(subject=OLD, group="new").bodies == [b"first"]
    rig.restart()
    assert rig.pull(subject=OLD, group="newer").sequences == [3]


def test_B10_while_retention_is_under_way_it_says_so(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_empty(rig)
    with monkeypatch.context() as patch:
        patch.setattr(rig.store.retention, "step", lambda: False)
        with pytest.raises(BusyError, match="retention is removing"):
            remove(rig)
    assert remove(rig).next_sequence == 3


def test_B10_removing_makes_room_for_another_subject(tmp_path: Path) -> None:
    limits = ServiceLimits(subjects=3, subjects_per_token=1)
    rig = Rig(tmp_path, store_options=RETAINING, limits=limits)

    def send_as(owner: str, subject: str) -> None:
        rig.broker.send(make_frame([BODY], subject=subject), lambda _: None, owner=owner)
        rig.broker.writer.step()
        rig.run_posted()
        rig.clock.pass_ms(5)

    send_as("shop", OLD)
    with pytest.raises(BusyError):
        send_as("shop", "orders.new")
    make_empty(rig, count=1)
    remove(rig)
    rig.restart()
    send_as("shop", "orders.new")
    send_as("", "third")
    with pytest.raises(BusyError):
        send_as("", "fourth")
    room = rig.broker.room.status()
    assert {one.name: one.used for one in room.bounds}["subjects"] == 3
    assert [(one.token, one.subjects) for one in room.tokens] == [("shop", 1)]
    rig.close()


def test_B13_without_removed_subjects_the_file_is_as_earlier_versions_wrote_it(rig: Rig) -> None:
    make_empty(rig)
    before = (rig.directory / "state/retained").read_bytes()
    remove(rig)
    after = (rig.directory / "state/retained").read_bytes()
    assert before[0] == 0x93
    assert after[0] == 0x94
    assert retained.read_retained(rig.store.disk, rig.store.store_id).removed == (OLD,)
