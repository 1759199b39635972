"""Offsets by time: the same as reading all of the log, whatever its frames are like."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.logs import frame_seek
from qmq_broker.storage.logs.frame_seek import LogRange, frame_at_or_after, read_message_frame
from tests.broker.storage.keyed import INDEXED, Keyed


@pytest.fixture(params=[64, 400, 10**9], ids=["halving", "both", "walking"])
def walked_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How small a part of the log is walked: little, so that small logs are halved too."""
    monkeypatch.setattr(frame_seek, "WALKED_BYTES", request.param)
    return int(request.param)


def expected(world: Keyed, time_ms: int) -> int | None:
    """The record that a walk over everything finds first."""
    return next(
        (one.place.physical_offset for one in world.kept if one.place.stored_at_ms >= time_ms), None
    )


def check_at(world: Keyed, time_ms: int) -> None:
    """Nothing stored before the time stands behind the offset, nothing after it before."""
    offset = world.store.offset_at(time_ms)
    first = expected(world, time_ms)
    if first is None:
        assert offset == world.store.durable_offset
        return
    before = [one.place.physical_offset for one in world.kept if one.place.physical_offset < offset]
    assert offset <= first
    assert len(before) == sum(one.place.stored_at_ms < time_ms for one in world.kept)


@pytest.mark.parametrize("seed", range(6))
def test_every_time_leads_to_its_frame(seed: int, walked_bytes: int) -> None:
    rng = random.Random(seed)
    world = Keyed(options=replace(INDEXED, segment_bytes=rng.choice((1024, 4096, 65_536))))
    for _ in range(40):
        world.send("a", room=rng.choice((1, 50, 300, 700)))
        world.clock.pass_ms(rng.choice((-1_000, 0, 5, 60_000)))  # often none between two frames
    times = {one.place.stored_at_ms for one in world.kept}
    for time_ms in sorted(times):
        for asked_ms in (time_ms - 1, time_ms, time_ms + 1):
            check_at(world, asked_ms)
    check_at(world, 0)
    check_at(world, 2**62)


def test_an_empty_log_has_its_end_for_every_time() -> None:
    world = Keyed()
    assert world.store.offset_at(0) == world.store.durable_offset
    world.send("a")
    check_at(world, 0)


def test_a_clock_that_went_back_changes_nothing(walked_bytes: int) -> None:
    world = Keyed()
    for number in range(30):
        world.send("a", room=200)
        if number == 12:
            world.clock.pass_ms(-20_000)
    for one in world.kept:
        check_at(world, one.place.stored_at_ms)


def test_old_frames_in_a_recycled_segment_are_not_taken_for_new_ones(walked_bytes: int) -> None:
    world = Keyed(options=replace(INDEXED, spare_segments=4))
    for _ in range(40):
        world.send("a", room=400)
        world.store.step()
        world.store.give_up_below(world.store.written_offset)
    base = world.store._commit_segments.bases[-1]
    assert world.store._commit_segments.is_recycled(base)
    for one in world.kept:
        if one.place.physical_offset >= world.store.first_offset:
            check_at(world, one.place.stored_at_ms)
    assert world.store.offset_at(2**62) == world.store.durable_offset


def test_a_damaged_frame_hides_no_frame_behind_it(walked_bytes: int) -> None:
    world = Keyed(options=replace(INDEXED, segment_bytes=65_536))
    for _ in range(30):
        world.send("a", room=200)
    frame = world.kept[14].place.physical_offset  # the next frame begins somewhere behind it
    header = frame_at_or_after(
        world.store._commit_segments, LogRange(frame, world.store.durable_offset)
    )
    assert header is not None
    world.hurt(header.physical_offset + 30)
    for one in world.kept[16:]:
        offset = world.store.offset_at(one.place.stored_at_ms)
        assert offset <= one.place.physical_offset < offset + 200
    with pytest.raises(CorruptionError):
        read_message_frame(world.store._commit_segments, header.physical_offset)


def test_the_next_frame_is_found_from_any_byte_on() -> None:
    world = Keyed()
    for _ in range(12):
        world.send("a", room=300)
    segments, end = world.store._commit_segments, world.store.durable_offset
    starts: list[int] = []
    offset = 0
    while (header := frame_at_or_after(segments, LogRange(offset, end))) is not None:
        starts.append(header.physical_offset)
        offset = header.physical_offset + header.frame_bytes
    assert offset == end
    for first, after in pairwise(starts):
        for byte in (first + 1, first + 8, after - 1):
            found = frame_at_or_after(segments, LogRange(byte, end))
            assert found is not None
            assert found.physical_offset == after
    assert frame_at_or_after(segments, LogRange(starts[-1] + 1, end)) is None
