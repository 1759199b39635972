"""Limits: their defaults, their ends, and that a record always fits a frame."""

from __future__ import annotations

import dataclasses

import pytest

from qmq_client.wire.frame import build_message_frame, parse_message_frame
from qmq_client.wire.limits import DEFAULT_LIMITS, FRAME_OVERHEAD_BYTES_MAX, Limits
from qmq_client.wire.record import Record, encode_record

HIGHEST = {
    "record_bytes": 2**30 - FRAME_OVERHEAD_BYTES_MAX,
    "tags": 64,
    "headers": 65_535,
    "headers_bytes": 65_535,
    "frame_bytes": 2**30,
    "records_per_frame": 1_000_000,
    "delay_ms": 100 * 366 * 24 * 3_600_000,
}


def limits_with(field: str, value: int) -> Limits:
    """Limits with one changed, the frame large enough for the record."""
    values = {"frame_bytes": 2**30} if field == "record_bytes" else {}
    values |= {"record_bytes": 1} if field == "frame_bytes" else {}
    return dataclasses.replace(DEFAULT_LIMITS, **(values | {field: value}))


def test_every_limit_has_its_edge_in_this_test() -> None:
    assert {field.name for field in dataclasses.fields(Limits)} == set(HIGHEST)


def test_the_default_limits_are_those_of_the_documents() -> None:
    assert dataclasses.asdict(DEFAULT_LIMITS) == {
        "record_bytes": 4 * 2**20,
        "tags": 16,
        "headers": 64,
        "headers_bytes": 16 * 2**10,
        "frame_bytes": 8 * 2**20,
        "records_per_frame": 10_000,
        "delay_ms": 2 * 366 * 24 * 3_600_000,
    }


@pytest.mark.parametrize(("field", "highest"), HIGHEST.items())
def test_a_limit_may_be_at_its_highest_and_not_one_over(field: str, highest: int) -> None:
    assert getattr(limits_with(field, highest), field) == highest
    with pytest.raises(ValueError, match=f"limit {field}: {highest + 1}"):
        limits_with(field, highest + 1)


@pytest.mark.parametrize("field", [field for field in HIGHEST if field != "frame_bytes"])
def test_a_limit_may_be_one_and_not_less(field: str) -> None:
    assert getattr(limits_with(field, 1), field) == 1
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"limit {field}: {value}; allowed: 1 to"):
            limits_with(field, value)


def test_a_frame_must_have_room_for_the_longest_record_and_its_tables() -> None:
    Limits(record_bytes=1000, frame_bytes=1000 + FRAME_OVERHEAD_BYTES_MAX)
    with pytest.raises(ValueError, match="does not fit a frame of 1255 bytes; leave 256 bytes"):
        Limits(record_bytes=1000, frame_bytes=1000 + FRAME_OVERHEAD_BYTES_MAX - 1)


@pytest.mark.parametrize("body_bytes", range(16))
def test_the_longest_record_under_the_longest_name_fits_the_frame(body_bytes: int) -> None:
    record_bytes = 36 + body_bytes
    limits = Limits(record_bytes=record_bytes, frame_bytes=record_bytes + FRAME_OVERHEAD_BYTES_MAX)
    record = Record(message_id=bytes(16), subject="s" * 127, body=b"x" * body_bytes, born_at_ms=0)
    frame = build_message_frame({record.subject: [encode_record(record, limits)]}, limits=limits)
    assert len(frame) <= limits.frame_bytes
    assert parse_message_frame(frame, limits).runs[0].subject == record.subject
