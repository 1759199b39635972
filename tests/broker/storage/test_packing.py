"""Entries that are packed all at once, against the same packed one by one."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq_broker.storage.queues.packing import pack_entries
from qmq_client.wire.frame import MessageFrame, build_message_frame, parse_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import Record, encode_record

IDS = MessageIds(1)


def frame_of(bodies: list[int], *, tagged: int) -> MessageFrame:
    """A frame of messages with bodies of these lengths; each so many-th has a tag, none for 0."""
    records = [
        encode_record(
            Record(
                message_id=IDS.next_id(),
                subject="a",
                body=bytes(body),
                tags=("t",) if tagged and number % tagged == 0 else (),
                born_at_ms=1,
            )
        )
        for number, body in enumerate(bodies)
    ]
    return parse_message_frame(build_message_frame({"a": records}))


def packed_singly(frame: MessageFrame, offset: int) -> bytes:
    places = zip(frame.positions, frame.lengths, frame.tag_hashes, strict=True)
    return b"".join(struct.pack(">QIQ", offset + at, length, tag) for at, length, tag in places)


OFFSETS = st.integers(0, 2**40) | st.integers(2**32 - 3_000, 2**32) | st.just(2**62)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12), st.integers(0, 2), OFFSETS)
def test_entries_are_those_of_each_record(bodies: list[int], tagged: int, offset: int) -> None:
    frame = frame_of(bodies, tagged=tagged)
    assert pack_entries(frame, offset) == packed_singly(frame, offset)


@pytest.mark.parametrize("is_even", [True, False], ids=["one length", "many lengths"])
@pytest.mark.parametrize("before", [0, 1, 20_000, 40_000])
def test_a_frame_may_stand_on_both_sides_of_four_gigabytes(*, is_even: bool, before: int) -> None:
    lengths = random.Random(5)
    frame = frame_of([40 if is_even else lengths.randrange(80) for _ in range(500)], tagged=0)
    assert isinstance(frame.positions, range) is is_even
    offset = 2**32 - before
    assert pack_entries(frame, offset) == packed_singly(frame, offset)
