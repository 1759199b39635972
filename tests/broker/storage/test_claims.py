"""What a start looks for behind the last good frame: blind for no frame, and quick where none is."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from qmq_broker.storage.logs.frame_scan import SCAN_BLOCK_BYTES, blocks, claims_in_segment
from qmq_broker.storage.store import Store
from qmq_client.wire.frame import FRAME_MAGIC, FrameKind, build_frame, read_header, stamp_frame
from tests.broker.storage.lives import restarted
from tests.crash.recording_disk import RecordingDisk
from tests.crash.world import RETAINING, History, World
from tests.kit.clock import FakeClock

GIB = 1 << 30
FRAME = build_frame(FrameKind.ACTIONS, b"x" * 20)


@dataclass
class Bytes:
    """A log of one segment."""

    base: int
    segment_bytes: int
    content: bytes
    #: Whether it is known which of its bytes were never written.
    knows_holes: bool = False
    reads: int = 0

    def base_of(self, _: int) -> int:
        return self.base

    def path(self, _: int) -> str:
        return "segment"

    def read(self, offset: int, count: int) -> bytes:
        self.reads += 1
        return self.content[offset - self.base :][:count]

    def data_from(self, offset: int) -> int:
        rest = self.content[offset - self.base :]
        return offset + (len(rest) - len(rest.lstrip(b"\0")) if self.knows_holes else 0)


def stamped(offset: int, *, epoch: int = 3) -> bytes:
    """A whole frame that says to stand there."""
    head = stamp_frame(FRAME, physical_offset=offset, stored_at_ms=1, epoch=epoch, durable_offset=0)
    return head + FRAME[len(head) :]


def claims(source: Bytes, *, epoch: int = 0) -> list[int]:
    """Where frames are found, from the beginning of the segment."""
    found = claims_in_segment(source, source.base, source.base, epoch=epoch)
    return [header.physical_offset - source.base for header in found]


@pytest.mark.parametrize("segment_bytes", [2048, 64 * 1024, 64 << 20, GIB, 3 * GIB, 1 << 44])
def test_B4_the_frames_of_a_segment_are_found_wherever_it_begins(segment_bytes: int) -> None:
    rng = random.Random(segment_bytes)
    places = [0, 96, 1048]
    for number in (0, 1, 2, 23, 91, 255, 2**18 - 1):
        base = number * segment_bytes
        content = bytearray(rng.randbytes(2048))
        for place in places:
            content[place : place + len(FRAME)] = stamped(base + place)
        # As if a frame began just before one: neither hides the other.
        content[80:84] = content[1032:1036] = content[1040:1044] = FRAME_MAGIC
        content[200 : 200 + len(FRAME)] = stamped(base + segment_bytes + 200)
        assert claims(Bytes(base, segment_bytes, bytes(content))) == places
        assert claims(Bytes(base, segment_bytes, bytes(content)), epoch=4) == []


@pytest.mark.parametrize("knows_holes", [False, True])
def test_B4_a_frame_is_found_behind_any_length_of_zeros_and_between_two_blocks(
    knows_holes: bool,
) -> None:
    for place in (SCAN_BLOCK_BYTES - 8, SCAN_BLOCK_BYTES, 3 * SCAN_BLOCK_BYTES + 64):
        content = bytes(place) + stamped(GIB + place) + bytes(2 * SCAN_BLOCK_BYTES)
        source = Bytes(GIB, GIB, content, knows_holes=knows_holes)
        assert claims(source) == [place]


def test_R11_space_that_was_never_written_is_not_read() -> None:
    place = 20 * SCAN_BLOCK_BYTES
    content = bytes(place) + stamped(place) + bytes(20 * SCAN_BLOCK_BYTES)
    for knows_holes, reads_max in ((False, 41), (True, 4)):
        source = Bytes(0, len(content), content, knows_holes=knows_holes)
        assert claims(source) == [place]
        assert source.reads <= reads_max


def test_R11_zeros_are_passed_over_as_blocks() -> None:
    """A new segment is a gigabyte of them: looking into each block took a start three seconds."""
    before, behind = bytes(9 * SCAN_BLOCK_BYTES // 2), bytes(3 * SCAN_BLOCK_BYTES)
    found = blocks(Bytes(0, GIB, before + b"x" + behind), 0, 0)
    assert [offset for offset, _ in found] == [4 * SCAN_BLOCK_BYTES]


def recycled() -> World:
    """Its log ends in a segment that is written again, where an old frame begins."""
    world = World(RecordingDisk(), history=History(options=RETAINING))
    log = world.store._commit_log.log
    for _ in range(40):
        world.send(world.frame(orders=300))
        world.clock.pass_ms(1_100)
        world.store.step()
        world.give_up()
        left = log.read(log.written_offset, RETAINING.segment_bytes)
        if left.startswith(FRAME_MAGIC):
            assert read_header(left).physical_offset < log.written_offset
            return world
    raise AssertionError("no segment was written again")


def test_old_frames_behind_the_end_of_a_recycled_segment_are_no_torn_tail() -> None:
    assert restarted(recycled()).recovery.torn_bytes == 0


def test_a_torn_tail_in_a_recycled_segment_is_cut_once() -> None:
    world = recycled()
    (placed,) = world.append(world.frame(orders=300))
    segments = world.store._commit_segments
    base = segments.base_of(placed.physical_offset)
    segments.file(base).write(placed.physical_offset - base + 200, [b"torn"])
    store = restarted(world)
    assert store.recovery.torn_bytes > 300
    assert store.durable_offset == placed.physical_offset
    image = store.disk.image  # type: ignore[attr-defined]  # a RecordingDisk
    again = Store.open(RecordingDisk(image), FakeClock(), world.options)
    assert again.recovery.torn_bytes == 0
