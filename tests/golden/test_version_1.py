"""Golden bytes of version 1 decode to their values and encode to the same bytes again."""

from __future__ import annotations

import struct

import pytest

from qmq_client.wire.deliveries import build_deliveries, parse_deliveries
from qmq_client.wire.frame import (
    FrameKind,
    build_message_frame,
    build_padding,
    parse_frame,
    parse_message_frame,
    read_header,
    stamp_frame,
    verify_body,
    verify_stamp,
)
from qmq_client.wire.record import decode_record, encode_record
from qmq_client.wire.requests import decode_control, encode_control
from tests.golden.version_1 import (
    CONTROLS,
    DELIVERIES_HEAD,
    FRAME_RUNS,
    RECORDS,
    STAMP,
    golden,
)


def slow_crc32c(data: bytes) -> int:
    """CRC-32C by long division, sharing nothing with the product."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


@pytest.mark.parametrize("name", RECORDS)
def test_a_golden_record_decodes_to_its_values(name: str) -> None:
    assert decode_record(RECORDS[name].subject, golden(name)) == RECORDS[name]


@pytest.mark.parametrize("name", RECORDS)
def test_a_golden_record_is_encoded_to_the_same_bytes(name: str) -> None:
    assert encode_record(RECORDS[name]) == golden(name)


def test_a_golden_record_reads_by_hand() -> None:
    data, subject = golden("record_full"), b"flight.departed"
    assert struct.unpack(">I", data[:4])[0] == slow_crc32c(subject + data[4:])
    assert data[4:20].hex() == "0123456789abcdef0000000000000001"
    assert struct.unpack(">BBHHHQ", data[20:36]) == (2, 6, 14, 36, 2, 1_357_034_220_000)
    assert data[36:42] == b"N14228"
    assert data[42:56] == b"severe,weather"
    headers = b"\x05\x00\x08trace4bf92f35" + b"\x06\x00\x0bsource" + "EWR → IAH".encode()
    assert data[56:92] == headers
    assert data[92:] == b'{"flight":1545}'


def test_a_golden_frame_reads_by_hand() -> None:
    data = golden("frame_stamped")
    head, body = data[:72], data[72:]
    assert struct.unpack(">4sBBHII", head[:16]) == (b"QMQF", 1, 1, 2, 416, 4)
    body_crc, stamp_crc, offset, stored_at_ms, epoch, gap, reserved, first, second = struct.unpack(
        ">IIQQIIQQQ", head[16:]
    )
    assert body_crc == slow_crc32c(head[:16] + body)
    assert stamp_crc == slow_crc32c(head[:20] + head[24:])
    assert (offset, stored_at_ms, epoch, gap) == (4096, 1_357_034_220_017, 3, 96)
    assert (reserved, first, second) == (0, 10, 0)
    table = b"\0\0\0\x03\x0fflight.departed" + b"\0\0\0\x01\x0eflight.delayed"
    assert body.startswith(table)
    lengths = struct.unpack_from(">4I", body, len(table))
    assert lengths == (43, 107, 49, 55)
    hashes = struct.unpack_from(">4Q", body, len(table) + 16)
    expected = 0
    for tag in (b"severe", b"weather"):
        value = slow_crc32c(tag)
        expected |= 1 << (value & 63) | 1 << (value >> 6 & 63)
    assert hashes == (0, expected, 0, 0)
    records = b"".join(golden(name) for names in FRAME_RUNS.values() for name in names)
    assert body[len(table) + 48 :] == records + bytes(3)


def test_the_golden_message_frame_is_parsed_and_built_again() -> None:
    data = golden("frame_messages")
    frame = parse_message_frame(data)
    records = {subject: [golden(name) for name in names] for subject, names in FRAME_RUNS.items()}
    assert [(run.subject, run.count, run.first_sequence) for run in frame.runs] == [
        ("flight.departed", 3, 0),
        ("flight.delayed", 1, 0),
    ]
    assert list(frame.records()) == [
        (subject, record) for subject, run in records.items() for record in run
    ]
    assert build_message_frame(records) == data


def test_the_golden_stamped_frame_carries_what_its_log_gave_it() -> None:
    data = golden("frame_stamped")
    frame = parse_message_frame(data)
    header = frame.header
    verify_stamp(header, data[: header.head_bytes])
    assert (header.physical_offset, header.stored_at_ms, header.epoch, header.durable_gap) == (
        STAMP["physical_offset"],
        STAMP["stored_at_ms"],
        STAMP["epoch"],
        96,
    )
    assert [run.first_sequence for run in frame.runs] == [10, 0]


def test_stamping_the_golden_message_frame_gives_the_golden_stamped_frame() -> None:
    sent = golden("frame_messages")
    head = stamp_frame(
        sent,
        physical_offset=4096,
        stored_at_ms=1_357_034_220_017,
        epoch=3,
        durable_offset=4000,
        first_sequences=(10, 0),
    )
    assert head + sent[len(head) :] == golden("frame_stamped")


def test_the_golden_frame_of_a_delayed_message_is_parsed_and_built_again() -> None:
    data = golden("frame_delayed")
    frame = parse_message_frame(data)
    assert frame.header.kind is FrameKind.DELAYED
    assert list(frame.records()) == [("flight.reminder", golden("record_delayed"))]
    records = {"flight.reminder": [golden("record_delayed")]}
    assert build_message_frame(records, kind=FrameKind.DELAYED) == data


def test_the_golden_padding_is_a_header_for_zeros_that_need_not_be_there() -> None:
    data = golden("frame_padding")
    header = read_header(data)
    assert (header.kind, header.frame_bytes) == (FrameKind.PADDING, 4096)
    verify_body(header, data)
    assert parse_frame(data + bytes(4040), frame_bytes_max=4096) == header
    assert build_padding(4096) == data


def test_the_golden_deliveries_are_parsed_and_built_again() -> None:
    data = golden("frame_deliveries")
    answer = parse_deliveries(data, frame_bytes_max=4096)
    assert answer.head == DELIVERIES_HEAD
    records = [golden(name) for name in FRAME_RUNS["flight.departed"]]
    assert [
        (message.sequence, message.pull_sequence, message.attempt, message.record)
        for message in answer.messages
    ] == [(10, 7, 1, records[0]), (11, 8, 1, records[1]), (4, 9, 2, records[2])]
    assert build_deliveries(answer.head, [len(record) for record in records], records) == data


@pytest.mark.parametrize("name", CONTROLS)
def test_a_golden_request_or_answer_decodes_to_its_values_and_back(name: str) -> None:
    data = golden(name)
    value = CONTROLS[name]
    assert decode_control(data, type(value)) == value
    assert encode_control(value) == data
