"""No parser takes memory by a length that it has not checked, nor much more than its input is long."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec
import pytest

from qmq_client.wire.deliveries import (
    DeliveriesHead,
    DeliveryRun,
    build_deliveries,
    parse_deliveries,
)
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import (
    FrameKind,
    build_frame,
    build_message_frame,
    build_padding,
    parse_frame,
    parse_message_frame,
    read_header,
)
from qmq_client.wire.record import Record, decode_record, encode_record
from qmq_client.wire.requests import PullRequest, SettleRequest, decode_control, decode_json
from tests.golden.version_1 import golden
from tests.wire.hostile import peak_bytes, reseal_frame, reseal_record, with_field

FRAME_BYTES_MAX = 8 * 2**20
#: What a refusal may cost: an error with its texts and a few copies of inputs of some 500 bytes.
SMALL_BYTES = 16 * 1024

FRAME, DELIVERIES = golden("frame_messages"), golden("frame_deliveries")
CONTROL, RECORD = golden("control_pull_request"), golden("record_full")


def control(content: bytes) -> bytes:
    return build_frame(FrameKind.CONTROL, struct.pack(">I", len(content)) + content)


def read_message_frame(data: bytes) -> None:
    list(parse_message_frame(data).records())


def read_deliveries(data: bytes) -> None:
    parse_deliveries(data, frame_bytes_max=FRAME_BYTES_MAX)


def read_settle(data: bytes) -> None:
    decode_control(data, SettleRequest)


def read_record(data: bytes) -> None:
    decode_record("flight.departed", data)


LIES: dict[str, tuple[Callable[[bytes], None], bytes]] = {
    "frame of 4 GiB": (read_message_frame, with_field(FRAME, 8, 4, 2**32 - 8)),
    "frame of 8 MiB": (read_message_frame, with_field(FRAME, 8, 4, FRAME_BYTES_MAX)),
    "padding of 4 GiB": (read_message_frame, build_padding(2**32 - 8)),
    "4 G records": (read_message_frame, reseal_frame(with_field(FRAME, 12, 4, 2**32 - 1))),
    "10,000 records": (read_message_frame, reseal_frame(with_field(FRAME, 12, 4, 10_000))),
    "65,535 subjects": (read_message_frame, reseal_frame(with_field(FRAME, 6, 2, 65_535))),
    "4 G records of a subject": (
        read_message_frame,
        reseal_frame(with_field(FRAME, 72, 4, 2**32 - 1)),
    ),
    "record of 4 GiB": (read_message_frame, reseal_frame(with_field(FRAME, 111, 4, 2**32 - 1))),
    "answer of 4 G records": (read_deliveries, reseal_frame(with_field(DELIVERIES, 12, 4, 2**32 - 1))),
    "answer's head of 4 GiB": (read_deliveries, reseal_frame(with_field(DELIVERIES, 56, 4, 2**32 - 1))),
    "request of 4 GiB": (read_settle, reseal_frame(with_field(CONTROL, 56, 4, 2**32 - 1))),
    "array of 4 G": (read_settle, control(b"\x84\xabsettlements\xdd\xff\xff\xff\xff")),
    "array of 64 Ki": (read_settle, control(b"\x84\xabsettlements\xdc\xff\xff")),
    "map of 4 G": (read_settle, control(b"\xdf\xff\xff\xff\xff")),
    "text of 4 GiB": (read_settle, control(b"\x84\xa7subject\xdb\xff\xff\xff\xff")),
    "key of 4 GiB": (read_settle, control(b"\x84\xdb\xff\xff\xff\xff")),
    "bytes of 4 GiB": (read_settle, control(b"\x84\xa7subject\xc6\xff\xff\xff\xff")),
    "65,535 headers": (
        read_record,
        reseal_record("flight.departed", with_field(RECORD, 26, 2, 65_535)),
    ),
    "headers of 64 KiB": (
        read_record,
        reseal_record("flight.departed", with_field(RECORD, 24, 2, 65_535)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_lie_about_a_length_is_refused_without_taking_its_memory(name: str) -> None:
    reader, data = LIES[name]

    def call() -> None:
        with pytest.raises(ProtocolError):
            reader(data)

    assert peak_bytes(call) < SMALL_BYTES


def test_a_header_that_lies_is_read_without_taking_memory() -> None:
    data = with_field(with_field(FRAME, 8, 4, 2**32 - 8), 12, 4, 2**32 - 1)
    assert peak_bytes(lambda: read_header(data)) < SMALL_BYTES


def smallest_record(count: int) -> bytes:
    return encode_record(
        Record(message_id=count.to_bytes(16, "big"), subject="a", body=b"", born_at_ms=0)
    )


def test_a_frame_full_of_smallest_records_costs_a_few_times_its_length() -> None:
    data = build_message_frame({"a": [smallest_record(count) for count in range(10_000)]})
    assert peak_bytes(lambda: parse_message_frame(data)) < 3 * len(data)
    assert peak_bytes(lambda: read_message_frame(data)) < 6 * len(data)


def test_an_answer_full_of_smallest_records_costs_a_few_times_its_length() -> None:
    count = 20_000
    head = DeliveriesHead(
        subject="a",
        token=1,
        lease_ms=1,
        first_pull_sequence=0,
        runs=(DeliveryRun(first_sequence=0, count=count, attempt=1),),
    )
    content = msgspec.msgpack.encode(head)
    lengths = struct.pack(">I", 36) * count
    body = struct.pack(">I", len(content)) + content + lengths + smallest_record(1) * count
    data = build_frame(FrameKind.DELIVERIES, body, record_count=count)
    assert peak_bytes(lambda: read_deliveries(data)) < 8 * len(data)


def test_an_answer_of_empty_records_is_refused_before_a_message_is_made() -> None:
    count = 100_000
    head = DeliveriesHead(
        subject="a",
        token=1,
        lease_ms=1,
        first_pull_sequence=0,
        runs=(DeliveryRun(first_sequence=0, count=count, attempt=1),),
    )
    content = msgspec.msgpack.encode(head)
    body = struct.pack(">I", len(content)) + content + bytes(4 * count)
    data = build_frame(FrameKind.DELIVERIES, body, record_count=count)

    def call() -> None:
        with pytest.raises(ProtocolError, match="shorter than 36"):
            read_deliveries(data)

    assert peak_bytes(call) < 4 * len(data)


def test_a_long_answer_is_made_with_one_copy_of_its_records() -> None:
    records = [encode_record(Record(bytes(16), "s", bytes(100_000), 1)) for _ in range(20)]
    long_bytes = sum(map(len, records))
    head = DeliveriesHead(
        subject="s",
        token=1,
        lease_ms=1,
        first_pull_sequence=0,
        runs=(DeliveryRun(first_sequence=0, count=len(records), attempt=1),),
    )
    lengths = list(map(len, records))
    assert peak_bytes(lambda: build_deliveries(head, lengths, records)) < 1.1 * long_bytes


def test_a_frame_of_a_mebibyte_of_zeros_costs_no_more_than_its_length() -> None:
    data = build_frame(FrameKind.CONTROL, bytes(2**20))
    assert peak_bytes(lambda: parse_frame(data, frame_bytes_max=2**21)) < 1.5 * len(data)


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"settlements":['])
def test_a_deep_nest_of_json_costs_a_few_times_its_length(opening: bytes) -> None:
    data = opening * (2**20 // len(opening))

    def call() -> None:
        with pytest.raises(ProtocolError, match="JSON"):
            decode_json(data, PullRequest)

    assert peak_bytes(call) < 8 * len(data)
