"""Fed cut, altered, random and extreme bytes, every parser parses or raises `ProtocolError`.

Nothing else may come out: an `IndexError` here would be a crashed request there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from qmq_client.message import record_to_message
from qmq_client.wire.deliveries import parse_deliveries
from qmq_client.wire.errors import ChecksumError, ProtocolError
from qmq_client.wire.frame import parse_frame, parse_message_frame, read_header
from qmq_client.wire.record import decode_record
from qmq_client.wire.requests import (
    PullRequest,
    SettleRequest,
    decode_control,
    decode_json,
    encode_json,
)
from tests.golden.version_1 import CONTROLS, RECORDS, golden
from tests.wire.hostile import (
    aligned,
    examples,
    extreme_fields,
    mutate,
    reseal_frame,
    reseal_record,
)

SUBJECT = "flight.departed"
FRAME_BYTES_MAX = 1024 * 1024
#: Header, subject table and record table of the frames here.
TABLES_BYTES = 160


def read_messages(data: bytes) -> None:
    """Everything that a broker and a consumer do with a message frame."""
    frame = parse_message_frame(data)
    ids = frame.message_ids()
    records = list(frame.records())
    assert len(ids) == len(records) == frame.header.record_count
    for subject, record in records:
        record_to_message(decode_record(subject, record))


def read_record(data: bytes) -> None:
    record_to_message(decode_record(SUBJECT, data))


def read_deliveries(data: bytes) -> None:
    answer = parse_deliveries(data, frame_bytes_max=FRAME_BYTES_MAX)
    for message in answer.messages:
        record_to_message(decode_record(answer.head.subject, message.record))


def read_frame(data: bytes) -> None:
    parse_frame(data, frame_bytes_max=FRAME_BYTES_MAX)


def read_only_header(data: bytes) -> None:
    read_header(data)


def read_pull(data: bytes) -> None:
    decode_control(data, PullRequest)


def read_json(data: bytes) -> None:
    decode_json(data, PullRequest)


JSON_PULL = encode_json(CONTROLS["control_pull_request"])
Reader = Callable[[bytes], None]
#: Name → parser, good bytes, and what makes altered bytes of its kind pass the checksum.
INPUTS: dict[str, tuple[Reader, bytes, Callable[[bytes], bytes]]] = {
    "message frame": (read_messages, golden("frame_messages"), reseal_frame),
    "delayed frame": (read_messages, golden("frame_delayed"), reseal_frame),
    "any frame": (read_frame, golden("frame_stamped"), reseal_frame),
    "padding": (read_frame, golden("frame_padding"), reseal_frame),
    "header": (read_only_header, golden("frame_padding"), bytes),
    "record": (
        read_record,
        golden("record_full"),
        lambda data: reseal_record(SUBJECT, data),
    ),
    "delayed record": (
        read_record,
        golden("record_delayed"),
        lambda data: reseal_record(SUBJECT, data),
    ),
    "deliveries": (read_deliveries, golden("frame_deliveries"), reseal_frame),
    "control": (read_pull, golden("control_pull_request"), reseal_frame),
    "json": (read_json, JSON_PULL, bytes),
}
every_input = pytest.mark.parametrize("name", INPUTS)


def attack(reader: Reader, inputs: Iterable[bytes]) -> tuple[int, int]:
    """How many of the inputs were parsed and how many refused; anything else is the reader's bug."""
    parsed = refused = 0
    for data in inputs:
        try:
            reader(data)
        except ProtocolError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} from {data.hex()}") from error
        else:
            parsed += 1
    return parsed, refused


def single_byte_changes(data: bytes, position: int) -> Iterable[bytes]:
    """All of them near the front, where most of the shape is said; behind it every fourth."""
    step = 1 if position < TABLES_BYTES else 4
    return (
        data[:position] + bytes((value,)) + data[position + 1 :]
        for value in range(position % step, 256, step)
        if value != data[position]
    )


@every_input
def test_every_truncation_is_refused(name: str) -> None:
    reader, good, reseal = INPUTS[name]
    if name == "header":
        good = good[:56]
    reader(reseal(good))
    parsed, refused = attack(reader, (good[:length] for length in range(len(good))))
    assert (parsed, refused) == (0, len(good))


@every_input
def test_every_truncation_with_right_checksums_parses_or_is_refused(name: str) -> None:
    reader, good, reseal = INPUTS[name]
    parsed, refused = attack(reader, (reseal(good[:length]) for length in range(len(good))))
    assert parsed + refused == len(good)
    assert refused


@every_input
def test_every_single_byte_change_parses_or_is_refused(name: str) -> None:
    reader, good, _ = INPUTS[name]
    for position in range(len(good)):
        attack(reader, single_byte_changes(good, position))


@every_input
def test_every_single_byte_change_with_right_checksums_parses_or_is_refused(name: str) -> None:
    reader, good, reseal = INPUTS[name]
    for position in range(len(good)):
        attack(reader, (reseal(data) for data in single_byte_changes(good, position)))


@pytest.mark.parametrize("name", ["message frame", "record", "deliveries", "control"])
def test_every_change_of_a_byte_that_the_sender_made_is_found(name: str) -> None:
    reader, good, reseal = INPUTS[name]
    good = reseal(good)
    stamped = range(20, 56 + 16) if name == "message frame" else range(20, 56)
    for position in range(len(good)):
        if name != "record" and position in stamped:
            continue
        changes = list(single_byte_changes(good, position))[::2]
        assert attack(reader, changes) == (0, len(changes)), position


@every_input
def test_extreme_values_in_every_field_parse_or_are_refused(name: str) -> None:
    reader, good, reseal = INPUTS[name]
    reader(reseal(good))
    first = 16 if name in {"message frame", "deliveries", "control", "any frame"} else 0
    attack(reader, (reseal(data) for data in extreme_fields(good, first)))


@pytest.mark.parametrize("name", ["message frame", "any frame", "deliveries", "control"])
def test_extreme_values_in_the_header_parse_or_are_refused(name: str) -> None:
    reader, good, reseal = INPUTS[name]
    head, rest = good[:16], good[16:]
    inputs = (data + rest for data in extreme_fields(head))
    attack(reader, (each for data in inputs for each in (data, reseal(data))))


@every_input
@examples(40)
@given(seed=st.integers(0, 2**64 - 1))
def test_random_changes_with_right_checksums_parse_or_are_refused(name: str, seed: int) -> None:
    reader, good, reseal = INPUTS[name]
    source = random.Random(seed)
    attack(reader, (reseal(aligned(mutate(good, source))) for _ in range(20)))
    attack(reader, (reseal(mutate(good, source)) for _ in range(20)))


@every_input
@examples(60)
@given(data=st.binary(max_size=300))
@example(data=b"")
@example(data=b"QMQF")
@example(data=b"QMQF\x01\x01" + bytes(50))
def test_random_bytes_parse_or_are_refused(name: str, data: bytes) -> None:
    reader, good, reseal = INPUTS[name]
    attack(reader, (data, reseal(data), good[:16] + data, reseal(aligned(good[:56] + data))))


@pytest.mark.parametrize("name", ["record", "delayed record"])
def test_a_record_altered_in_its_shape_is_refused_even_with_a_right_checksum(name: str) -> None:
    reader, good, reseal = INPUTS[name]
    reader(reseal(good))
    for position, value in ((20, 0x08), (20, 0x03), (20, 0xFF), (26, 0xFF), (24, 0xFF), (28, 0x01)):
        data = good[:position] + bytes((value,)) + good[position + 1 :]
        assert attack(reader, [reseal(data)]) == (0, 1), (position, value)


def test_every_record_is_refused_under_another_subject() -> None:
    for name, record in RECORDS.items():
        for subject in ("flight", "flight.departeD", "flight.departed.", record.subject + "x"):
            with pytest.raises(ChecksumError):
                decode_record(subject, golden(name))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"subject":' * 20_000,
        b'{"subject":"a","group":"b","consumer":"c","wait_ms":-1}',
        b'{"subject":"a","group":"b","consumer":"c","wait_ms":9223372036854775808}',
        b'{"subject":"a","group":"b","consumer":"c","wait_ms":' + b"9" * 10_000 + b"}",
        b'{"subject":"a","group":"b","consumer":"c","wait_ms":1.5}',
        b'{"subject":"a","group":"b","consumer":"c","wait_ms":NaN}',
        b'{"subject":"a","group":"b","consumer":"c","wait_ms":true}',
        b'{"subject":"a","group":"b","consumer":"c","unheard":1}',
        b'{"subject":"\\ud800","group":"b","consumer":"c","wait_ms":"1"}',
        b'{"subject":"a","group":"b","consumer":"c","settlements":[{"token":1,"acks":[[1]]}]}',
        b'{"subject":"a","group":"b","consumer":"c","settlements":[{"token":1,"acks":[[1,2,3]]}]}',
    ],
)
def test_json_that_is_no_pull_request_is_refused(data: bytes) -> None:
    for kind in (PullRequest, SettleRequest):
        with pytest.raises(ProtocolError, match="JSON"):
            decode_json(data, kind)
