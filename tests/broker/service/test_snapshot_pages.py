"""Dead letters between the memory, the snapshots and files of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import pytest

from qmq_broker.errors import DiskError, DiskFullError
from qmq_broker.service.delivery import letter_pool
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.disk_port import DiskFile
from qmq_broker.storage.files.letters import LetterPage
from qmq_broker.storage.files.snapshots import SnapshotPage
from qmq_client.group import dead_letters
from qmq_client.group.actions import Action, Dead
from qmq_client.wire.operations import DeadRequest
from qmq_client.wire.requests import Reject, Settlement
from qmq_client.wire.start import parse_start
from tests.broker.service.retaining import RETAINING, files, keep_house, with_options
from tests.broker.service.rig import GROUP, SUBJECT, Rig

#: All dead letters but those used last are in files, five in each.
PAGED = ServiceLimits(dead_letters_memory_bytes=1)
LETTERS = 5


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(dead_letters, "BLOCK_LETTERS_MAX", LETTERS)
    made = Rig(tmp_path / "broker", limits=PAGED, store_options=RETAINING)
    yield made
    made.close()


def fill(rig: Rig, count: int) -> None:
    """Let so many messages die."""
    for _ in range(count // 20):
        rig.send(*[b"x"] * 20)
        rig.settle(rig.pull(max_messages=20).reject("no"))


def write_snapshot(rig: Rig) -> None:
    with_options(rig, snapshot_bytes=1)
    keep_house(rig, ms=1_000)


def snapshots(rig: Rig) -> list[str]:
    """Names of the files, drafts too."""
    return [name for name in files(rig, "state") if name.startswith("groups.")]


def sequences(rig: Rig) -> list[int]:
    letters = rig.broker.query.dead_letters(SUBJECT, GROUP, count=10_000)
    return [one.sequence for one in letters]


def purge(rig: Rig, first: int, next_: int) -> None:
    request = DeadRequest(subject=SUBJECT, group=GROUP, first=first, next=next_)
    rig.broker.changes.purge(request, rig.now_ms)


def purge_all(rig: Rig) -> None:
    purge(rig, 0, 400)


def seek_to_the_start(rig: Rig) -> None:
    rig.broker.changes.seek(SUBJECT, GROUP, parse_start("earliest"), rig.now_ms)


def remove(rig: Rig) -> None:
    rig.broker.changes.remove(SUBJECT, GROUP, rig.now_ms)


def test_a_start_reads_the_letters_from_its_snapshot_and_writes_none(rig: Rig) -> None:
    fill(rig, 100)
    write_snapshot(rig)
    with_options(rig)
    assert files(rig, layout.LETTERS) == []
    assert rig.broker.room.status().dead_letters.memory_bytes < 1_000
    for _ in range(3):  # replaces the snapshot that the start read
        fill(rig, 20)
        keep_house(rig, ms=1_000)
    assert sequences(rig) == list(range(160))
    purge(rig, 2, 158)
    assert sequences(rig) == [0, 1, 158, 159]
    rig.restart()
    assert sequences(rig) == [0, 1, 158, 159]


def test_B10_a_start_on_a_disk_without_room_keeps_to_its_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(rig, 200)
    write_snapshot(rig)
    monkeypatch.setattr(OsDisk, "free_bytes", lambda self: 0)
    rig.restart()
    assert rig.broker.room.status().dead_letters.memory_bytes < 1_000
    assert sequences(rig) == list(range(200))


def test_B10_letters_that_are_read_on_a_disk_without_room_leave_the_memory_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(rig, 200)
    monkeypatch.setattr(OsDisk, "free_bytes", lambda self: 0)
    fill(rig, 20)
    before = rig.broker.room.status().dead_letters.memory_bytes
    assert sequences(rig) == list(range(220))
    read = LetterPage.read
    reads: list[str] = []

    def count(page: LetterPage) -> bytes:
        reads.append(page.path)
        return read(page)

    monkeypatch.setattr(LetterPage, "read", count)
    assert sequences(rig) == list(range(220))
    assert len(reads) <= 200 // LETTERS
    assert rig.broker.room.status().dead_letters.memory_bytes < 3 * before


def test_a_replay_removes_the_files_that_it_has_made_useless(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq_broker.service.delivery.delivery._REPLAYED_PER_STEP", 10)
    fill(rig, 200)
    for sequence in range(0, 200, 2):
        purge(rig, sequence, sequence + 1)
    rig.kill()
    rig.start()
    assert sequences(rig) == list(range(1, 200, 2))
    assert len(files(rig, layout.LETTERS)) < 2 * 200 // LETTERS


def test_letters_of_a_group_that_ended_are_forgotten_at_a_start(rig: Rig) -> None:
    fill(rig, 100)
    remove(rig)
    rig.kill()
    rig.start()
    told = rig.broker.room.status().dead_letters
    assert (told.letters, told.memory_bytes) == (0, 0)


@pytest.mark.parametrize("end", [purge_all, seek_to_the_start, remove])
def test_B6_letters_that_nobody_gets_any_more_leave_memory_and_disk(
    rig: Rig, end: Callable[[Rig], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(letter_pool, "_FREED_MAX", 10)
    fill(rig, 400)
    pool = rig.broker.delivery.pool
    end(rig)
    steps = 0
    while pool.file_bytes:
        before = pool.file_bytes
        rig.pass_ms(1)
        steps += 1
        assert pool.file_bytes < before
    assert steps == 400 // LETTERS // 10
    assert files(rig, layout.LETTERS) == []


def test_B6_a_snapshot_without_room_is_put_off_and_leaves_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(rig, 200)
    with_options(rig, snapshot_bytes=1)
    with monkeypatch.context() as full:
        full.setattr(OsDisk, "free_bytes", lambda self: 0)
        keep_house(rig, ms=1_000)
        assert snapshots(rig) == []
    keep_house(rig, ms=1_000)
    assert snapshots(rig)
    rig.restart()
    assert sequences(rig) == list(range(200))


def test_B6_a_snapshot_needs_its_own_room_above_the_reserve_and_no_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(rig, 200)
    with_options(rig, snapshot_bytes=1, reserve_bytes=1_000)
    needed_bytes = rig.broker.delivery.budget.dead_letters_bytes + 1_000
    monkeypatch.setattr(OsDisk, "free_bytes", lambda self: needed_bytes - 1)
    keep_house(rig, ms=1_000)
    assert snapshots(rig) == []
    assert f"{needed_bytes - 1} bytes are free; {needed_bytes} are needed." in caplog.text
    monkeypatch.setattr(OsDisk, "free_bytes", lambda self: needed_bytes)
    keep_house(rig, ms=1_000)
    assert snapshots(rig)


def test_B6_a_snapshot_that_was_cut_short_by_a_crash_takes_no_room_after_it(rig: Rig) -> None:
    fill(rig, 20)
    path = rig.directory / layout.draft_path(layout.SNAPSHOTS[0])
    rig.kill()
    path.write_bytes(b"x" * 1_000_000)
    rig.start()
    assert not path.exists()
    assert sequences(rig) == list(range(20))


def test_B6_a_snapshot_without_dead_letters_is_written_on_a_disk_below_its_reserve(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_options(rig, snapshot_bytes=1)
    fill(rig, 20)
    purge(rig, 0, 20)
    monkeypatch.setattr(OsDisk, "free_bytes", lambda self: 0)
    keep_house(rig, ms=1_000)
    assert snapshots(rig)


def test_a_page_that_is_in_memory_is_not_read_for_a_snapshot(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(rig, 20)
    write_snapshot(rig)
    rig.restart()
    monkeypatch.setattr(rig.broker.delivery.pool, "bytes_max", 1_000_000)
    assert sequences(rig) == list(range(20))  # in memory from now on
    read = SnapshotPage.read

    def fail(page: SnapshotPage) -> bytes:
        raise DiskError(operation="read", path="groups", reason="bad sector")

    monkeypatch.setattr(SnapshotPage, "read", fail)
    _, content = rig.broker.delivery.snapshot(rig.now_ms)
    assert sum(len(page.read()) for page in content().pages)
    monkeypatch.setattr(SnapshotPage, "read", read)


def test_a_snapshot_with_a_bad_sector_leaves_the_one_before(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_options(rig, snapshot_bytes=1)
    for _ in range(3):
        fill(rig, 20)
        keep_house(rig, ms=1_000)
    newest = max(layout.SNAPSHOTS, key=lambda path: (rig.directory / path).stat().st_mtime_ns)
    opened = OsDisk.open

    def fail(disk: OsDisk, path: str, **how: bool) -> DiskFile:
        if path == newest and not how:
            raise DiskError(operation="read", path=path, reason="bad sector")
        return opened(disk, path, **how)

    monkeypatch.setattr(OsDisk, "open", fail)
    rig.restart()
    assert sequences(rig) == list(range(60))


def test_a_pull_is_not_shortened_by_dead_letters(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "BLOCK_LETTERS_MAX", 1)
    fill(rig, 60)
    for _ in range(20):
        rig.send(*[b"x"] * 20, expires_at_ms=rig.now_ms + 10_000)
    assert len(rig.pull(max_messages=1_000).bodies) == 400


def test_B6_a_snapshot_that_met_a_full_disk_leaves_no_draft(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(rig, 200)
    offset, content = rig.broker.delivery.snapshot(rig.now_ms)
    made = content()

    def until_full() -> Iterator[dead_letters.Page]:
        yield from islice(made.pages, 3)
        raise DiskFullError("no room")

    with pytest.raises(DiskFullError):
        rig.store.actions.write_snapshot(offset, made._replace(pages=until_full()))
    assert snapshots(rig) == []


def test_B1_actions_are_synced_while_a_long_snapshot_is_written(rig: Rig) -> None:
    fill(rig, 100)
    synced: list[int] = []
    log, sync = rig.store.actions.log, rig.broker._action_sync

    def slowly(pages: Iterator[dead_letters.Page]) -> Iterator[dead_letters.Page]:
        for page in pages:
            rig.send(b"x")
            rig.settle(rig.pull().reject("no"))
            rig.clock.pass_ms(1_000)
            synced.append(log.written_offset - log.durable_offset)
            yield page

    offset, content = rig.broker.delivery.snapshot(rig.now_ms)
    made = content()
    sync.keep(offset, lambda: made._replace(pages=slowly(iter(made.pages))))
    sync.step()
    assert len(synced) == 100 // LETTERS
    assert max(synced) < 4 * synced[0]
    assert log.durable_offset == log.written_offset


def test_a_stop_does_not_wait_for_a_long_snapshot(rig: Rig) -> None:
    fill(rig, 100)
    log, sync = rig.store.actions.log, rig.broker._action_sync
    read: list[dead_letters.Page] = []

    def stop_after(pages: Iterator[dead_letters.Page]) -> Iterator[dead_letters.Page]:
        for page in pages:
            read.append(page)
            sync.stop()
            yield page

    offset, content = rig.broker.delivery.snapshot(rig.now_ms)
    made = content()
    sync.keep(offset, lambda: made._replace(pages=stop_after(iter(made.pages))))
    sync.run()
    assert len(read) == 1
    assert snapshots(rig) == []
    assert log.durable_offset == log.written_offset
    rig.restart()
    assert sequences(rig) == list(range(100))


def test_B10_a_portion_of_a_settlement_changes_few_pages(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "BLOCK_LETTERS_MAX", 1)
    fill(rig, 200)
    for first in range(0, 200, 2):
        request = DeadRequest(subject=SUBJECT, group=GROUP, first=first, next=first + 1)
        rig.broker.changes.replay(request, rig.now_ms)
    given = rig.pull(max_messages=1_000)
    assert len(given.bodies) == 100
    rejects = Settlement(
        token=given.token, rejects=(Reject(range=(given.first, given.next), reason="no"),)
    )
    logged: list[int] = []
    append = rig.store.actions.append

    def log(actions: Sequence[Action]) -> None:
        append(actions)
        logged.append(sum(type(one) is Dead for one in actions))

    monkeypatch.setattr(rig.store.actions, "append", log)
    rig.settle(rejects)
    assert sum(logged) == 100
    assert max(logged) <= 50
    assert sequences(rig) == list(range(200))
