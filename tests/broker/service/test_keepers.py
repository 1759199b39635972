"""Retention waits for whoever keeps the logs elsewhere, holds that over restarts, and counts what goes by force."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from qmq_broker.errors import (
    CorruptionError,
    DiskError,
    DiskFullError,
    NotFoundError,
    PoisonedError,
)
from qmq_broker.service.keeping import KeeperStatus
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.background import Work
from qmq_broker.storage.files.keepers import Keeper
from qmq_broker.storage.keepers import KEEPERS_MAX, NO_BOUND, LogOffsets
from qmq_client.wire.errors import InvalidMessageError
from tests.broker.service.retaining import (
    RETAINING,
    act,
    files,
    first_sequence,
    keep_house,
    send,
    with_options,
)
from tests.broker.service.rig import Rig
from tests.kit.waiting import DEADLINE_S

SEGMENT = RETAINING.segment_bytes
ACTION_SEGMENT = RETAINING.action_segment_bytes
NAME = "archive"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, store_options=RETAINING)
    yield made
    made.close()


def keep(rig: Rig, offset: int = 0, actions_offset: int = 0, name: str = NAME) -> Keeper:
    """Tell the broker how far somebody keeps its logs."""
    outcomes: list[Keeper | Exception] = []
    told = LogOffsets(offset, actions_offset)
    rig.broker.keeping.keep(name, told, rig.now_ms, outcomes.append)
    return done(rig, outcomes)


def end(rig: Rig, name: str = NAME) -> Keeper:
    outcomes: list[Keeper | Exception] = []
    rig.broker.keeping.end(name, outcomes.append)
    return done(rig, outcomes)


def done(rig: Rig, outcomes: list[Keeper | Exception]) -> Keeper:
    rig.broker.writer.step()
    rig.run_posted()
    (outcome,) = outcomes
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def status(rig: Rig) -> KeeperStatus:
    (found,) = rig.broker.keeping.statuses(rig.now_ms)
    return found


def test_B12_retention_waits_for_a_keeper_and_goes_as_far_as_it_has_told(rig: Rig) -> None:
    send(rig, 30)
    keep(rig)
    assert keep_house(rig) == 0
    assert status(rig).held_bytes >= 2 * SEGMENT
    keep(rig, 2 * SEGMENT + 5)
    assert keep_house(rig) == 2 * SEGMENT, "the segment that it has in part stays"
    keep(rig, rig.store.durable_offset)
    assert keep_house(rig) > 2 * SEGMENT
    assert (status(rig).lost_bytes, status(rig).held_bytes) == (0, 0)


def test_B12_the_slowest_of_several_keepers_is_waited_for(rig: Rig) -> None:
    send(rig, 30)
    keep(rig, SEGMENT, name="slow")
    keep(rig, 4 * SEGMENT, name="fast")
    assert keep_house(rig) == SEGMENT
    end(rig, "slow")
    assert keep_house(rig) == 4 * SEGMENT


@pytest.mark.parametrize("stop", ["close", "kill"])
def test_B12_a_keeper_is_waited_for_over_a_restart_and_a_rebuild(rig: Rig, stop: str) -> None:
    send(rig, 30)
    keep(rig, SEGMENT)
    getattr(rig, stop)()
    for path in (layout.QUEUE_TABLE, layout.INDEX_TABLE):
        (rig.directory / path).unlink(missing_ok=True)
    rig.start()
    assert status(rig).kept_offset == SEGMENT
    assert keep_house(rig) == SEGMENT
    end(rig)
    rig.restart()
    assert rig.broker.keeping.statuses(rig.now_ms) == []
    assert keep_house(rig) > SEGMENT


def test_a_keeper_never_goes_back_nor_beyond_the_durable_end(rig: Rig) -> None:
    send(rig, 30)
    keep(rig, 2 * SEGMENT)
    end_offset = rig.store.durable_offset
    for offset, said in (
        (SEGMENT, "at least 4096, which keeper archive"),
        (end_offset + 1, "up to"),
    ):
        with pytest.raises(InvalidMessageError, match=said) as raised:
            keep(rig, offset)
        assert (raised.value.field, raised.value.value) == ("kept_offset", str(offset))
        assert raised.value.remedy
    with pytest.raises(InvalidMessageError, match="kept_actions_offset"):
        keep(rig, end_offset, rig.store.actions.log.durable_offset + 1)
    assert status(rig).kept_offset == 2 * SEGMENT
    keep(rig, 2 * SEGMENT)
    assert rig.broker.serving.is_stopping is False, "a refusal is no failure of the broker"


def test_a_new_keeper_is_waited_for_from_where_the_log_begins(rig: Rig) -> None:
    send(rig, 30)
    begins = keep_house(rig)
    assert begins > 0
    assert keep(rig).kept_offset == begins
    assert status(rig).lost_bytes == 0


def test_B12_a_keeper_that_has_nothing_of_a_log_yet_says_so_until_it_has(rig: Rig) -> None:
    """As an archive does whose first run ends before it, and one that waits for a whole segment of actions."""
    send(rig, 30)
    noting(rig)
    begins, actions_begin = rig.store.first_offset, rig.store.actions.first_offset
    assert begins > 0 < actions_begin
    for _ in range(2):
        kept = keep(rig)
        assert (kept.kept_offset, kept.kept_actions_offset) == (begins, actions_begin)
        rig.restart()
    send(rig, 30)
    kept = keep(rig, begins + SEGMENT)
    assert (kept.kept_offset, kept.kept_actions_offset) == (begins + SEGMENT, actions_begin)
    with pytest.raises(InvalidMessageError, match="keeper archive has reported before"):
        keep(rig)
    assert (status(rig).lost_bytes, status(rig).lost_actions_bytes) == (0, 0)


def test_B12_a_keeper_that_comes_while_segments_go_learns_from_where_it_is_waited_for(
    rig: Rig,
) -> None:
    send(rig, 30)
    waiting: list[Work] = []
    rig.store.retention.background.start = waiting.append
    rig.clock.pass_ms(3_600_000)
    rig.broker.step()
    rig.broker.writer.step()
    assert waiting
    assert rig.store.first_offset == 0, "what is given up is being noted"
    kept = keep(rig).kept_offset
    while waiting:
        waiting.pop(0)()
        rig.broker.writer.step()
    assert kept == rig.store.first_offset > 0
    assert status(rig).lost_bytes == 0


def test_B12_a_keeper_that_comes_between_the_choice_and_the_writer_loses_nothing(rig: Rig) -> None:
    send(rig, 30)
    outcomes: list[Keeper | Exception] = []
    rig.broker.keeping.keep(NAME, LogOffsets(0, 0), rig.now_ms, outcomes.append)
    rig.clock.pass_ms(3_600_000)
    rig.broker.step()
    assert rig.store.keepers.all == (), "retention has chosen without it"
    for _ in range(4):
        rig.broker.writer.step()
    rig.run_posted()
    (kept,) = outcomes
    assert isinstance(kept, Keeper)
    assert kept.kept_offset == rig.store.first_offset == 0


def test_B12_nobody_comes_in_between_the_choice_of_actions_and_their_end(rig: Rig) -> None:
    keepers, order = rig.store.keepers, []

    def first() -> LogOffsets:
        order.append("is told where the log begins")
        return LogOffsets(0, 0)

    def come() -> None:
        keepers.keep(NAME, LogOffsets(0, 0), rig.now_ms, first=first, durable=LogOffsets(0, 0))

    coming = Thread(target=come)
    with keepers.given_up_actions() as kept_offset:
        coming.start()
        coming.join(0.1)
        order.append("actions go")
    coming.join(DEADLINE_S)
    assert kept_offset == NO_BOUND
    assert order == ["actions go", "is told where the log begins"]


def test_while_a_keeper_holds_everything_back_the_writer_is_not_asked(rig: Rig) -> None:
    send(rig, 30)
    keep(rig)
    for _ in range(3):
        rig.clock.pass_ms(3_600_000)
        rig.broker.step()
        assert rig.broker.writer._tasks.empty()


def test_keepers_are_few_and_one_too_many_is_refused_with_a_remedy(rig: Rig) -> None:
    for number in range(KEEPERS_MAX):
        keep(rig, name=f"keeper-{number}")
    with pytest.raises(InvalidMessageError, match=f"{KEEPERS_MAX} keepers") as raised:
        keep(rig)
    assert raised.value.field == "name"
    assert "remove-keeper" in raised.value.remedy
    keep(rig, name="keeper-3")
    with pytest.raises(NotFoundError, match="no keeper other"):
        end(rig, "other")
    end(rig, "keeper-3")
    keep(rig)


def test_B12_by_force_a_keeper_loses_bytes_and_their_number_is_reported_by_name(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    send(rig, 30)
    keep(rig, SEGMENT)
    with_options(rig, force_retention=True)
    with caplog.at_level(logging.WARNING):
        begins = keep_house(rig)
    lost = begins - SEGMENT
    assert lost > 0
    assert f"given up before it was kept: keeper=archive bytes={lost}" in caplog.text
    assert status(rig).lost_bytes == lost
    assert status(rig).lag_bytes == rig.store.durable_offset - begins
    with_options(rig)
    caplog.clear()
    keep_house(rig)
    assert status(rig).lost_bytes == lost
    assert "given up" not in caplog.text, "it was told once"
    keep(rig, rig.store.durable_offset)
    rig.restart()
    assert status(rig).lost_bytes == lost


def test_B12_an_archive_that_was_reading_when_the_segment_went_by_force_has_lost_less(
    rig: Rig,
) -> None:
    send(rig, 30)
    keep(rig)
    with_options(rig, force_retention=True)
    begins = keep_house(rig)
    keep(rig, SEGMENT)
    assert status(rig).lost_bytes == begins - SEGMENT


def noting(rig: Rig, **changes: Any) -> None:
    with_options(rig, snapshot_bytes=1, **changes)
    for _ in range(4):
        act(rig, 7)
        keep_house(rig, ms=1_000)


def test_actions_stay_until_a_keeper_has_them_also_over_a_restart(rig: Rig) -> None:
    keep(rig)
    noting(rig)
    whole = files(rig, "actionlog")
    assert whole[0] == "0" * 20
    assert len(whole) >= 4
    rig.restart()
    assert files(rig, "actionlog")[0] == "0" * 20
    keep(rig, 0, 2 * ACTION_SEGMENT)
    act(rig, 7)
    keep_house(rig, ms=1_000)
    assert files(rig, "actionlog")[0] == f"{2 * ACTION_SEGMENT:020d}"
    assert status(rig).lost_actions_bytes == 0


def test_B6_actions_wait_for_no_keeper_while_the_disk_is_below_its_reserve(rig: Rig) -> None:
    keep(rig)
    noting(rig)
    rig.store.keepers._options = replace(RETAINING, reserve_bytes=2**60)
    act(rig, 7)
    keep_house(rig, ms=1_000)
    assert files(rig, "actionlog")[0] != "0" * 20
    assert status(rig).lost_actions_bytes >= ACTION_SEGMENT


def test_a_file_of_keepers_that_cannot_be_read_stops_the_start(rig: Rig) -> None:
    keep(rig)
    rig.close()
    path = rig.directory / layout.KEEPERS
    content = path.read_bytes()
    path.write_bytes(b"?" + content[1:])
    with pytest.raises(CorruptionError, match="keepers"):
        rig.start()
    path.write_bytes(content)
    rig.start()


def test_a_keeper_ahead_of_a_log_that_was_restored_waits_for_what_comes_behind_its_end(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    send(rig, 30)
    assert keep_house(rig) > 0
    keep(rig, rig.store.durable_offset)
    told = (rig.directory / layout.KEEPERS).read_bytes()
    rig.close()
    for path in rig.directory.rglob("*"):
        if path.is_file() and path.name != layout.FORMAT:
            path.unlink()
    rig.start()
    send(rig, 2)
    end_offset = rig.store.durable_offset
    rig.close()
    (rig.directory / layout.KEEPERS).write_bytes(told)
    with caplog.at_level(logging.WARNING):
        rig.start()
    assert "keeper ahead of the log: keeper=archive" in caplog.text
    assert status(rig).kept_offset == end_offset
    assert keep(rig).kept_offset == end_offset, "it has nothing of what comes"
    send(rig, 30)
    rig.restart()
    assert status(rig).kept_offset == end_offset
    assert keep_house(rig) <= end_offset
    assert first_sequence(rig) == 0


def test_a_disk_without_room_refuses_a_keeper_and_changes_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(rig, 30)
    keep(rig, SEGMENT)
    full = _Full(rig.store.keepers._disk)
    monkeypatch.setattr(rig.store.keepers, "_disk", full)
    for name in (NAME, "other"):
        with pytest.raises(full.error):
            keep(rig, 2 * SEGMENT, name=name)
    assert [(one.name, one.kept_offset) for one in rig.store.keepers.all] == [(NAME, SEGMENT)]
    monkeypatch.undo()
    keep(rig, 2 * SEGMENT)


class _Full:
    """A disk that has no room for new files."""

    def __init__(self, disk: Any) -> None:
        self._disk = disk
        self.error = DiskFullError

    def open(self, path: str, *, is_new: bool = False) -> Any:
        if is_new:
            raise self.error("no room")
        return self._disk.open(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)


def test_B5_a_failed_write_of_keepers_ends_the_broker_and_no_keeper_is_answered(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(rig, 5)
    broken = _Full(rig.store.keepers._disk)

    def fail(path: str, *, is_new: bool = False) -> Any:
        raise DiskError(operation="open", path=path, reason="broken")

    monkeypatch.setattr(broken, "open", fail)
    monkeypatch.setattr(rig.store.keepers, "_disk", broken)
    with pytest.raises(DiskError):
        keep(rig)
    assert rig.store.keepers.all == ()
    with pytest.raises(PoisonedError):
        keep(rig)
