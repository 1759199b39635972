"""Summaries of sealed segments: what they say, who uses them, and that they may be lost at any time."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.faults import Level
from qmq_broker.storage.files.small_file import read_file
from qmq_broker.storage.index import key_search
from qmq_broker.storage.index.key_search import TimeRange
from qmq_broker.storage.logs import summary
from qmq_broker.storage.logs.summary import SegmentSummary
from qmq_broker.storage.upkeep.backup import back_up
from qmq_broker.storage.upkeep.rebuild import rebuild_store
from qmq_broker.storage.upkeep.verify import verify_store
from tests.broker.storage.damaged import flip
from tests.broker.storage.keyed import INDEXED, Kept, Keyed
from tests.broker.storage.test_frame_seek import check_at
from tests.crash.recording_disk import RecordingDisk
from tests.kit.clock import FakeClock

#: Some ten frames a segment, no key index.
SMALL = replace(INDEXED, segment_bytes=4096, index_entries=0)


@pytest.fixture(autouse=True)
def _many_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "MARK_BYTES", 700)


def filled(seed: int = 1, frames: int = 60) -> Keyed:
    """Several sealed segments of three subjects, one of which is in few of them."""
    rng = random.Random(seed)
    world = Keyed(options=SMALL)
    for number in range(frames):
        subject = "rare" if number in {20, 21} else rng.choice(("orders", "Invoices"))
        world.send(
            *("k" for _ in range(rng.randint(1, 4))), subject=subject, room=rng.choice((9, 90))
        )
    return world


def summarise(world: Keyed, bytes_max: int = 500) -> list[SegmentSummary]:
    """Step until all is done; the summaries of all sealed segments."""
    for _ in range(10_000):
        if not world.store.summaries.step(bytes_max):
            break
    else:
        raise AssertionError("the summaries do not come to an end")
    found = [world.store.summaries.find(base) for base in sealed(world)]
    assert None not in found
    return [one for one in found if one is not None]


def sealed(world: Keyed) -> list[int]:
    end = world.store.durable_offset // SMALL.segment_bytes * SMALL.segment_bytes
    return list(range(world.store.first_offset, end, SMALL.segment_bytes))


def of_segment(world: Keyed, base: int) -> list[Kept]:
    return [
        one for one in world.kept if base <= one.place.physical_offset < base + SMALL.segment_bytes
    ]


def content(world: Keyed, path: str) -> bytes:
    return read_file(world.disk, path) or b""


def put(world: Keyed, path: str, data: bytes) -> None:
    file = world.disk.open(path)
    file.truncate(0)
    file.write(0, [data])
    file.close()


@pytest.mark.parametrize("bytes_max", [1, 500, 10**6], ids=["by frame", "by half", "whole"])
def test_a_summary_says_what_is_in_its_segment(bytes_max: int) -> None:
    world = filled()
    found = summarise(world, bytes_max)
    assert len(found) > 3
    for one in found:
        kept = of_segment(world, one.base)
        times = [each.place.stored_at_ms for each in kept]
        assert (one.messages, one.first_stored_at_ms, one.last_stored_at_ms) == (
            len(kept),
            times[0],
            times[-1],
        )
        assert one.subjects is not None
        assert [span.subject for span in one.subjects] == sorted({k.place.subject for k in kept})
        assert one.subject_count == len(one.subjects)
        for span in one.subjects:
            places = [each.place for each in kept if each.place.subject == span.subject]
            assert span.messages == len(places)
            assert (span.first_sequence, span.next_sequence) == (
                places[0].sequence,
                places[-1].sequence + 1,
            )
            assert span.first_offset < places[0].physical_offset
            assert span.last_offset < places[-1].physical_offset
        stored = {each.place.stored_at_ms for each in kept}
        assert {mark.stored_at_ms for mark in one.marks} <= stored
        assert len(one.marks) > 2


def test_a_segment_that_is_full_to_its_last_byte_has_a_summary_at_once() -> None:
    world = Keyed(options=SMALL)
    world.send("k")
    first = world.store.written_offset
    world.send("k", room=8)
    left = SMALL.segment_bytes - world.store.written_offset
    world.send("k", room=left - (world.store.written_offset - first) + 8)
    assert world.store.durable_offset == SMALL.segment_bytes
    assert [one.messages for one in summarise(world)] == [3]


def test_with_very_many_subjects_only_their_number_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "SUBJECTS_MAX", 1)
    found = summarise(filled())
    assert {(one.subject_count, one.subjects) for one in found} >= {(2, None)}


@pytest.mark.parametrize("harm", ["missing", "flipped", "of another segment"])
def test_B11_a_summary_that_is_lost_or_damaged_is_made_again(harm: str) -> None:
    world = filled()
    before = summarise(world)
    paths = [layout.summary_path(base) for base in sealed(world)]
    contents = [content(world, path) for path in paths]
    for path, own, other in zip(paths, contents, contents[1:] + contents[:1], strict=True):
        if harm == "missing":
            world.disk.unlink(path)
        else:
            put(world, path, flip(40)(own) if harm == "flipped" else other)
    world = world.again()
    assert [world.store.summaries.find(base) for base in sealed(world)] == [None] * len(paths)
    assert summarise(world) == before


def test_B11_a_start_believes_the_summaries_that_are_there() -> None:
    world = filled()
    summarise(world)
    world = world.again()
    count = len(world.disk.operations)
    summarise(world)
    assert len(world.disk.operations) == count, "nothing was written"


@pytest.mark.parametrize("seed", range(4))
def test_every_time_leads_to_its_frame_with_summaries(seed: int) -> None:
    world = filled(seed)
    summarise(world)
    for one in world.kept:
        for time_ms in (
            one.place.stored_at_ms - 1,
            one.place.stored_at_ms,
            one.place.stored_at_ms + 1,
        ):
            check_at(world, time_ms)


def test_a_mark_that_leads_astray_is_not_believed() -> None:
    world = filled()
    (one, *_) = summarise(world)
    marks = tuple(summary.TimeMark(mark.offset + 8, mark.stored_at_ms) for mark in one.marks)
    world.store.summaries._cached[one.base] = msgspec.structs.replace(one, marks=marks)
    for kept in of_segment(world, one.base):
        check_at(world, kept.place.stored_at_ms)


def test_a_search_passes_over_segments_without_the_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_search, "LOOKED_THROUGH_BYTES_MAX", 2 * SMALL.segment_bytes)
    world = filled()
    wanted = [one.place for one in world.kept if one.place.subject == "rare"][::-1]
    assert not world.store.search.by_key("rare", "k", TimeRange(), 100).found, "too far back"
    summarise(world)
    found = world.store.search.by_key("rare", "k", TimeRange(), 100)
    assert found.found == wanted
    assert found.is_complete


def test_what_was_given_up_has_no_summary() -> None:
    world = filled()
    summarise(world)
    world.clock.pass_ms(10_000)
    world.store.step()
    world.store.step()
    assert world.store.give_up_below(world.store.durable_offset) > 0
    summarise(world)
    names = world.disk.names(layout.SUMMARIES)
    assert names == [f"{base:020d}" for base in sealed(world)]


def test_a_damaged_segment_has_no_summary_and_stops_no_other() -> None:
    world = filled()
    world.hurt(SMALL.segment_bytes + 900)
    for _ in range(1_000):
        if not world.store.summaries.step(500):
            break
    found = [world.store.summaries.find(base) is not None for base in sealed(world)]
    assert found == [True, False] + [True] * (len(found) - 2)


def test_verify_finds_a_summary_that_is_not_right_and_rebuild_removes_it() -> None:
    world = filled()
    (one, other, *_) = summarise(world)
    wrong = msgspec.structs.replace(one, messages=one.messages + 1)
    summary.write_summary(world.disk, wrong)
    path = layout.summary_path(other.base)
    world.store.close()
    put(world, path, flip(30)(content(world, path)))
    found = verify_store(world.disk, FakeClock(), check_groups=len)
    assert [(fault.level, fault.file) for fault in found.faults] == [
        (Level.REBUILT, layout.summary_path(one.base)),
        (Level.REBUILT, path),
    ]
    assert "rebuild" in found.faults[0].remedy
    assert rebuild_store(world.disk, FakeClock(), with_index=True).summaries == len(sealed(world))
    assert not verify_store(world.disk, FakeClock(), check_groups=len).faults


def test_a_backup_has_the_summaries() -> None:
    world = filled()
    before = summarise(world)
    world.clock.pass_ms(10_000)
    world.store.step()
    target = RecordingDisk()
    back_up(world.disk, target, FakeClock(), link=lambda path: False)
    again = Keyed(target, options=SMALL, kept=world.kept)
    assert [again.store.summaries.find(one.base) for one in before] == before
