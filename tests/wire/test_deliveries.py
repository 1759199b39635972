"""Deliveries: what a pull's answer gives back, and what is no answer."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq_client.wire.deliveries import (
    DeliveriesHead,
    DeliveryRun,
    build_deliveries,
    parse_deliveries,
)
from qmq_client.wire.errors import ChecksumError, ProtocolError
from qmq_client.wire.frame import FrameKind, build_frame
from qmq_client.wire.record import Record, encode_record
from tests.golden.version_1 import golden
from tests.wire.hostile import examples, records

BYTES_MAX = 8 * 2**20
RECORD = encode_record(Record(message_id=bytes(16), subject="a", body=b"", born_at_ms=0))


def head_of(runs: list[tuple[int, int, int]], first_pull_sequence: int = 0) -> DeliveriesHead:
    return DeliveriesHead(
        subject="a",
        token=1,
        lease_ms=30_000,
        first_pull_sequence=first_pull_sequence,
        runs=tuple(
            DeliveryRun(first_sequence=first, count=count, attempt=attempt)
            for first, count, attempt in runs
        ),
    )


def answer_of(
    runs: list[tuple[int, int, int]], lengths: list[int], rest: bytes, *, count: int | None = None
) -> bytes:
    """An answer from parts that need not fit each other, its checksum right."""
    content = msgspec.msgpack.encode(head_of(runs))
    body = b"".join(
        (struct.pack(">I", len(content)), content, struct.pack(f">{len(lengths)}I", *lengths), rest)
    )
    records_said = len(lengths) if count is None else count
    return build_frame(FrameKind.DELIVERIES, body, record_count=records_said)


RUNS = st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 4), st.integers(1, 20)), max_size=5)


@examples(40)
@given(runs=RUNS, first=st.integers(0, 2**62), source=st.data())
def test_every_answer_gives_its_messages_with_sequences_and_attempts(
    runs: list[tuple[int, int, int]], first: int, source: st.DataObject
) -> None:
    count = sum(run[1] for run in runs)
    made = source.draw(st.lists(records(), min_size=count, max_size=count))
    encoded = [encode_record(record) for record in made]
    head = head_of(runs, first)
    answer = parse_deliveries(
        build_deliveries(head, [len(record) for record in encoded], encoded),
        frame_bytes_max=BYTES_MAX,
    )
    assert answer.head == head
    assert [message.record for message in answer.messages] == encoded
    assert [message.pull_sequence for message in answer.messages] == list(
        range(first, first + count)
    )
    assert [(message.sequence, message.attempt) for message in answer.messages] == [
        (sequence + place, attempt) for sequence, length, attempt in runs for place in range(length)
    ]


def test_an_empty_answer_has_no_messages() -> None:
    data = build_deliveries(head_of([]), [], [])
    assert parse_deliveries(data, frame_bytes_max=BYTES_MAX).messages == ()


def test_neighbouring_records_may_be_given_as_one_slice() -> None:
    slices: list[bytes | memoryview] = [RECORD * 3, memoryview(RECORD * 2)]
    data = build_deliveries(head_of([(0, 5, 1)]), [len(RECORD)] * 5, slices)
    messages = parse_deliveries(data, frame_bytes_max=BYTES_MAX).messages
    assert [message.record for message in messages] == [RECORD] * 5


def test_10000_messages_in_runs_of_one_are_given() -> None:
    runs = [(2 * place, 1, 1) for place in range(10_000)]
    data = build_deliveries(head_of(runs), [len(RECORD)] * 10_000, [RECORD] * 10_000)
    messages = parse_deliveries(data, frame_bytes_max=BYTES_MAX).messages
    assert [message.sequence for message in messages] == [first for first, _, _ in runs]


def test_sequences_stay_exact_up_to_the_last() -> None:
    head = head_of([(2**63 - 2, 2, 1)], first_pull_sequence=2**63 - 2)
    data = build_deliveries(head, [len(RECORD)] * 2, [RECORD] * 2)
    messages = parse_deliveries(data, frame_bytes_max=BYTES_MAX).messages
    assert [message.sequence for message in messages] == [2**63 - 2, 2**63 - 1]
    assert [message.pull_sequence for message in messages] == [2**63 - 2, 2**63 - 1]


HUGE = 2**63 - 1
NEVER_ANSWERS: dict[str, tuple[bytes, str]] = {
    "nothing": (build_frame(FrameKind.DELIVERIES, b""), "ends inside a length"),
    "head over the end": (
        build_frame(FrameKind.DELIVERIES, struct.pack(">I", 2**32 - 1) + bytes(4)),
        "inside a part of 4294967295 bytes",
    ),
    "head of nothing": (build_frame(FrameKind.DELIVERIES, bytes(8)), "MessagePack"),
    "head of another type": (
        build_frame(FrameKind.DELIVERIES, struct.pack(">I", 1) + b"\x90" + bytes(3)),
        "MessagePack: Expected `object`, got `array`",
    ),
    "most records": (answer_of([(0, HUGE, 1)], [], b"", count=2**32 - 1), "its record lengths"),
    "run too long": (answer_of([(0, 2, 1)], [36], RECORD), "runs do not add up"),
    "run too short": (answer_of([(0, 1, 1)], [36] * 2, RECORD * 2), "runs do not add up"),
    "run endless": (answer_of([(0, HUGE, 1)], [36], RECORD), "runs do not add up"),
    "runs that overflow": (
        answer_of([(0, HUGE, 1), (0, HUGE, 1), (0, 3, 1)], [36], RECORD),
        "runs do not add up",
    ),
    "no runs": (answer_of([], [36], RECORD), "runs do not add up"),
    "record too long": (answer_of([(0, 1, 1)], [45], RECORD), "lengths do not add up"),
    "record too short": (answer_of([(0, 2, 1)], [36] * 2, RECORD * 2 + bytes(16)), "do not add up"),
    "record endless": (answer_of([(0, 1, 1)], [2**32 - 1], RECORD), "lengths do not add up"),
    "fill not zero": (answer_of([(200, 1, 1)], [36], RECORD + b"\1"), "lengths do not add up"),
    "record of nothing": (answer_of([(0, 2, 1)], [36, 0], RECORD), "shorter than 36"),
    "record of 35": (answer_of([(0, 2, 1)], [37, 35], RECORD * 2), "shorter than 36"),
}


def test_zeros_behind_the_records_are_fill() -> None:
    data = answer_of([(200, 1, 1)], [36], RECORD + b"\0")
    assert len(parse_deliveries(data, frame_bytes_max=BYTES_MAX).messages) == 1


@pytest.mark.parametrize("name", NEVER_ANSWERS)
def test_a_frame_with_a_right_checksum_that_is_no_answer_is_refused(name: str) -> None:
    data, said = NEVER_ANSWERS[name]
    with pytest.raises(ProtocolError, match=said) as caught:
        parse_deliveries(data, frame_bytes_max=BYTES_MAX)
    assert not isinstance(caught.value, ChecksumError)


@pytest.mark.parametrize(
    "field",
    ["token", "lease_ms", "first_pull_sequence"],
)
@pytest.mark.parametrize("value", [-1, 2**63, 2**64 - 1, "1", None, 1.0])
def test_a_head_with_a_number_that_is_none_is_refused(field: str, value: object) -> None:
    head = msgspec.to_builtins(head_of([])) | {field: value}
    content = msgspec.msgpack.encode(head)
    data = build_frame(FrameKind.DELIVERIES, struct.pack(">I", len(content)) + content)
    with pytest.raises(ProtocolError, match=rf"\$\.{field}"):
        parse_deliveries(data, frame_bytes_max=BYTES_MAX)


@pytest.mark.parametrize("kind", set(FrameKind) - {FrameKind.DELIVERIES, FrameKind.PADDING})
def test_a_frame_of_another_kind_is_no_answer(kind: FrameKind) -> None:
    with pytest.raises(ProtocolError, match=f"of kind {kind.name} is not an answer to a pull"):
        parse_deliveries(build_frame(kind, b""), frame_bytes_max=BYTES_MAX)


def test_an_answer_over_the_limit_is_refused() -> None:
    data = golden("frame_deliveries")
    parse_deliveries(data, frame_bytes_max=len(data))
    with pytest.raises(ProtocolError, match="over the limit of 367"):
        parse_deliveries(data, frame_bytes_max=len(data) - 1)
