"""Stamps: what a log adds to a frame is guarded by a checksum of its own; and padding."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq_client.wire.errors import ChecksumError, ProtocolError
from qmq_client.wire.frame import (
    DURABLE_GAP_MAX,
    FRAME_HEADER_BYTES,
    FrameKind,
    build_padding,
    parse_message_frame,
    read_header,
    stamp_frame,
    verify_body,
    verify_stamp,
)
from tests.golden.version_1 import golden
from tests.wire.hostile import examples, with_field

TWO = golden("frame_messages")
STAMP: dict[str, Any] = {
    "physical_offset": 2**40,
    "stored_at_ms": 1_357_034_220_017,
    "epoch": 3,
    "durable_offset": 2**40 - 512,
    "first_sequences": (10, 2**63 - 1),
}


def stamped(**values: Any) -> bytes:
    head = stamp_frame(TWO, **(STAMP | values))
    return head + TWO[len(head) :]


def check_stamp(data: bytes) -> None:
    header = read_header(data)
    verify_stamp(header, data[: header.head_bytes])


def test_a_stamped_frame_says_what_the_log_gave_it_and_its_body_is_unchanged() -> None:
    data = stamped()
    check_stamp(data)
    frame = parse_message_frame(data)
    header = frame.header
    assert (header.physical_offset, header.stored_at_ms, header.epoch, header.durable_gap) == (
        2**40,
        1_357_034_220_017,
        3,
        512,
    )
    assert [run.first_sequence for run in frame.runs] == [10, 2**63 - 1]
    assert header.body_crc == read_header(TWO).body_crc
    assert data[72:] == TWO[72:]
    assert data[:20] == TWO[:20]


@pytest.mark.parametrize(
    ("offset", "durable", "gap"),
    [(0, 0, 0), (100, 100, 0), (2**32, 1, 2**32 - 1), (2**32, 0, DURABLE_GAP_MAX), (2**63, 0, DURABLE_GAP_MAX)],
)  # fmt: skip
def test_the_durable_gap_is_what_was_not_yet_durable_up_to_its_width(
    offset: int, durable: int, gap: int
) -> None:
    data = stamped(physical_offset=offset, durable_offset=durable)
    check_stamp(data)
    assert read_header(data).durable_gap == gap


@pytest.mark.parametrize(
    "change",
    [
        {"physical_offset": 2**40 + 8, "durable_offset": 2**40 - 504},
        {"physical_offset": 0, "durable_offset": 0},
        {"epoch": 2},
        {"epoch": 4},
        {"stored_at_ms": 1_357_034_220_018},
        {"durable_offset": 2**40},
        {"first_sequences": (11, 2**63 - 1)},
        {"first_sequences": (10, 0)},
    ],
)
def test_B4_a_stamp_of_another_place_time_or_opening_is_found(change: dict[str, Any]) -> None:
    good, other = stamped(), stamped(**change)
    assert good[20:24] != other[20:24]
    mixed = good[:24] + other[24:]
    verify_body(read_header(mixed), mixed)
    with pytest.raises(ChecksumError, match="stamp does not fit its checksum"):
        check_stamp(mixed)


def test_every_altered_bit_of_a_stamped_head_is_found() -> None:
    good = stamped()
    for bit in range(8 * 72):
        changed = bytearray(good)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            check_stamp(bytes(changed))


def test_a_frame_that_no_log_has_stamped_has_no_good_stamp() -> None:
    with pytest.raises(ChecksumError):
        check_stamp(TWO)


@examples(50)
@given(
    offset=st.integers(0, 2**63 - 1),
    stored_at_ms=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 2**32 - 1),
    sequences=st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1)),
)
def test_every_stamp_reads_back(
    offset: int, stored_at_ms: int, epoch: int, sequences: tuple[int, int]
) -> None:
    data = stamped(
        physical_offset=offset,
        durable_offset=offset,
        stored_at_ms=stored_at_ms,
        epoch=epoch,
        first_sequences=sequences,
    )
    check_stamp(data)
    frame = parse_message_frame(data)
    header = frame.header
    assert (header.physical_offset, header.stored_at_ms, header.epoch) == (
        offset,
        stored_at_ms,
        epoch,
    )
    assert tuple(run.first_sequence for run in frame.runs) == sequences


def test_stamping_again_gives_the_head_of_the_new_place() -> None:
    again = stamp_frame(stamped(), **(STAMP | {"epoch": 9}))
    assert again == stamped(epoch=9)[: len(again)]


@pytest.mark.parametrize("frame_bytes", [56, 64, 4096, 2**30])
def test_padding_is_a_header_alone_and_what_follows_does_not_matter(frame_bytes: int) -> None:
    data = build_padding(frame_bytes)
    assert len(data) == FRAME_HEADER_BYTES
    header = read_header(data)
    assert (header.kind, header.frame_bytes, header.record_count) == (
        FrameKind.PADDING,
        frame_bytes,
        0,
    )
    verify_body(header, data + b"stale bytes of a recycled file")
    with pytest.raises(ChecksumError):
        verify_body(header, with_field(data, 8, 4, frame_bytes + 8))
    stamp = stamp_frame(data, physical_offset=8, stored_at_ms=1, epoch=1, durable_offset=0)
    check_stamp(stamp)
