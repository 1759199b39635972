"""Frames: round trips, limits at their edges, stamps, padding."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq_client.wire.errors import (
    ChecksumError,
    InvalidNameError,
    ProtocolError,
    TooLargeError,
    UnknownVersionError,
)
from qmq_client.wire.frame import (
    FRAME_ALIGNMENT_BYTES,
    FRAME_HEADER_BYTES,
    FrameKind,
    build_frame,
    build_message_frame,
    build_padding,
    parse_frame,
    parse_message_frame,
    read_header,
)
from qmq_client.wire.frame_head import MESSAGE_KINDS
from qmq_client.wire.limits import SUBJECTS_PER_FRAME_MAX, Limits
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import Record, encode_record, record_tag_hash
from tests.golden.version_1 import golden
from tests.wire.hostile import NAMES, examples, records, reseal_frame, with_field


def encoded(body: bytes = b"", subject: str = "flight", counter: int = 0) -> bytes:
    message_id = MessageIds(1, first_counter=counter).next_id()
    record = Record(message_id=message_id, subject=subject, body=body, born_at_ms=0)
    return encode_record(record)


ONE = build_message_frame({"flight": [encoded()]})
TWO = golden("frame_messages")
RUNS = st.dictionaries(NAMES, st.lists(records(), min_size=1, max_size=4), min_size=1, max_size=4)


@examples(40)
@given(RUNS)
def test_every_frame_parses_to_what_it_was_built_from(runs: dict[str, list[Record]]) -> None:
    by_subject = {subject: [encode_record(each) for each in run] for subject, run in runs.items()}
    data = build_message_frame(by_subject)
    frame = parse_message_frame(data)
    in_order = [(subject, record) for subject, run in by_subject.items() for record in run]
    assert list(frame.records()) == in_order
    assert [frame.record(index) for index in range(len(in_order))] == [each for _, each in in_order]
    assert frame.message_ids() == [each.message_id for run in runs.values() for each in run]
    assert frame.tag_hashes == tuple(record_tag_hash(each) for _, each in in_order)
    assert [(run.subject, run.count) for run in frame.runs] == [
        (subject, len(run)) for subject, run in runs.items()
    ]
    assert frame.header.frame_bytes == len(data)
    assert len(data) % FRAME_ALIGNMENT_BYTES == 0
    assert data[20 : frame.header.head_bytes] == bytes(frame.header.head_bytes - 20)


@examples(100)
@given(
    kind=st.sampled_from(FrameKind), body=st.binary(max_size=100), count=st.integers(0, 2**32 - 1)
)
def test_a_frame_of_any_kind_is_filled_with_zeros_and_read_back(
    kind: FrameKind, body: bytes, count: int
) -> None:
    data = build_frame(kind, body, record_count=count)
    header = read_header(data)
    assert (header.kind, header.record_count, header.subject_count) == (kind, count, 0)
    assert data[FRAME_HEADER_BYTES:] == body + bytes(-len(body) % 8)
    if kind is not FrameKind.PADDING:
        assert parse_frame(data, frame_bytes_max=len(data)) == header


def test_a_header_is_read_in_the_middle_of_other_bytes() -> None:
    assert read_header(b"x" * 24 + TWO + b"y" * 8, 24) == read_header(TWO)
    with pytest.raises(ProtocolError, match="inside its header"):
        read_header(TWO, len(TWO) - 55)


def test_the_most_subjects_fit_one_frame_and_one_more_does_not() -> None:
    runs = {f"s{count:0126d}": [encoded(subject="s")] for count in range(SUBJECTS_PER_FRAME_MAX)}
    frame = parse_message_frame(build_message_frame(runs))
    assert [run.subject for run in frame.runs] == list(runs)
    assert frame.header.head_bytes == 56 + 8 * 1024
    runs["one.more"] = [encoded()]
    with pytest.raises(TooLargeError) as caught:
        build_message_frame(runs)
    assert (caught.value.field, caught.value.limit, caught.value.value) == (
        "frame subjects",
        "1024",
        "1025",
    )
    assert caught.value.remedy == "Send several frames."


def test_10000_records_fit_one_frame_and_one_more_does_not() -> None:
    run = [encoded(counter=count) for count in range(10_000)]
    frame = parse_message_frame(build_message_frame({"flight": run}))
    assert [record for _, record in frame.records()] == run
    with pytest.raises(TooLargeError) as caught:
        build_message_frame({"flight": [*run, run[0]]})
    assert (caught.value.field, caught.value.limit, caught.value.value) == (
        "frame records",
        "10000",
        "10001",
    )


def test_a_frame_is_as_long_as_its_limit_and_not_longer() -> None:
    record = encoded(b"x" * 500)
    frame_bytes = len(build_message_frame({"flight": [record]}))
    limits = Limits(record_bytes=600, frame_bytes=frame_bytes + 256)
    longer = encoded(b"x" * 756)
    assert len(longer) == len(record) + 256
    limits_for_longer = Limits(record_bytes=800, frame_bytes=frame_bytes + 512)
    assert len(build_message_frame({"flight": [longer]}, limits=limits)) == limits.frame_bytes
    with pytest.raises(TooLargeError) as caught:
        build_message_frame({"flight": [longer, longer]}, limits=limits)
    assert (caught.value.field, caught.value.limit) == ("frame bytes", str(limits.frame_bytes))
    both = build_message_frame({"flight": [longer, longer]})
    assert caught.value.value == str(len(both))
    with pytest.raises(
        ProtocolError, match=f"is over the limit of {limits_for_longer.frame_bytes}"
    ):
        parse_message_frame(both, limits_for_longer)


@pytest.mark.parametrize("runs", [{}, {"flight": []}, {"flight": [encoded()], "other": []}])
def test_a_frame_without_messages_for_a_subject_is_not_built(runs: dict[str, list[bytes]]) -> None:
    with pytest.raises(ValueError, match="at least one record for each"):
        build_message_frame(runs)


@pytest.mark.parametrize("subject", ["", "..", "x" * 128, "x" * 300, "a\n", "é"])
def test_a_frame_for_a_subject_that_is_no_name_is_not_built(subject: str) -> None:
    with pytest.raises(InvalidNameError) as caught:
        build_message_frame({subject: [encoded()]})
    assert caught.value.field == "subject"


# What no message frame is, with checksums made right: (change, what the refusal says).


def retabled(table: list[tuple[int, bytes]], lengths: list[int], rest: bytes, **head: int) -> bytes:
    """A message frame from parts that need not fit each other."""
    subjects = b"".join(struct.pack(">IB", count, len(name)) + name for count, name in table)
    columns = struct.pack(f">{len(lengths)}I", *lengths) + bytes(8 * len(lengths))
    return build_frame(
        FrameKind(head.get("kind", 1)),
        subjects + columns + rest,
        record_count=head.get("records", len(lengths)),
        subject_count=head.get("subjects", len(table)),
    )


RECORD = encoded()
NEVER_FRAMES: dict[str, tuple[bytes, str]] = {
    "no records": (retabled([(0, b"a")], [], b"", records=0), "0 records"),
    "too many records": (retabled([(10_001, b"a")], [], b"", records=10_001), "10001 records"),
    "most records": (retabled([(2**32 - 1, b"a")], [], b"", records=2**32 - 1), "4294967295 records"),
    "no subjects": (retabled([], [36], RECORD), "0 subjects"),
    "1,025 subjects": (
        retabled([(1, b"%d" % count) for count in range(1025)], [36] * 1025, RECORD * 1025),
        "1025 subjects",
    ),
    "fewer subjects than said": (
        retabled([(1, b"a")], [36], RECORD, subjects=2),
        r"subject|add up",
    ),
    "subject without records": (retabled([(1, b"a"), (0, b"b")], [36], RECORD), "'b' of 0 records"),
    "subject twice": (retabled([(1, b"a"), (1, b"a")], [36, 36], RECORD * 2), "'a' of 1 records"),
    "subject without a name": (retabled([(1, b"")], [36], RECORD), "'' of 1 records"),
    "subject of 128": (retabled([(1, b"x" * 128)], [36], RECORD), "of 1 records"),
    "subject that is no name": (retabled([(1, b"../a")], [36], RECORD), "of 1 records"),
    "subject with a newline": (retabled([(1, b"a\n")], [36], RECORD), "of 1 records"),
    "subject not ASCII": (retabled([(1, "é".encode())], [36], RECORD), "of 1 records"),
    "counts over": (retabled([(2, b"a")], [36], RECORD), "subject counts do not add up"),
    "counts under": (retabled([(1, b"a")], [36, 36], RECORD * 2), "subject counts do not add up"),
    "counts that overflow": (
        retabled([(2**32 - 1, b"a"), (2, b"b")], [36], RECORD),
        "subject counts do not add up",
    ),
    "no table": (retabled([(9_999, b"a")], [], b"", records=9_999), "inside its record table"),
    "record too long": (retabled([(1, b"a")], [45], RECORD), "lengths do not add up"),
    "record too short": (retabled([(1, b"a")], [28], RECORD), "lengths do not add up"),
    "record endless": (retabled([(1, b"a")], [2**32 - 1], RECORD), "lengths do not add up"),
    "record of nothing": (retabled([(2, b"a")], [36, 0], RECORD), "a record is 0 bytes long; allowed: 36"),
    "record of 35": (retabled([(2, b"a")], [37, 35], RECORD * 2), "a record is 35 bytes long; allowed: 36"),
    "record over the limit": (
        retabled([(1, b"a")], [4 * 2**20 + 8], bytes(4 * 2**20 + 8)),
        "to 4194304",
    ),
    "fill of 8": (retabled([(1, b"a")], [36], RECORD + bytes(16)), "lengths do not add up"),
    "fill not zero": (retabled([(1, b"a")], [36], RECORD + b"\1"), "lengths do not add up"),
    "no room for the sequences": (
        reseal_frame(build_frame(FrameKind.MESSAGES, b"")[:6] + b"\0\1" + ONE[8:56]),
        "length 56 is not a multiple of 8, or shorter",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEVER_FRAMES)
def test_a_frame_with_right_checksums_that_holds_no_messages_is_refused(name: str) -> None:
    data, said = NEVER_FRAMES[name]
    with pytest.raises(ProtocolError, match=said) as caught:
        parse_message_frame(data)
    assert not isinstance(caught.value, ChecksumError)


@pytest.mark.parametrize("kind", sorted(set(FrameKind) - MESSAGE_KINDS))
def test_a_frame_of_another_kind_holds_no_messages(kind: FrameKind) -> None:
    data = build_frame(kind, b"", record_count=1, subject_count=1)
    if kind is FrameKind.PADDING:
        data = build_padding(64) + bytes(8)
    with pytest.raises(ProtocolError, match=f"of kind {kind.name} holds no messages"):
        parse_message_frame(data)


def test_another_version_is_told_from_garbage() -> None:
    for version in (0, 2, 255):
        with pytest.raises(UnknownVersionError, match=f"frame version {version}; .* knows 1"):
            parse_message_frame(with_field(ONE, 4, 1, version))
    with pytest.raises(ProtocolError, match="magic is b'QMQG'"):
        parse_message_frame(b"QMQG" + ONE[4:])
    for kind in (0, 99, 255):
        with pytest.raises(ProtocolError, match=f"kind {kind} is not known"):
            parse_message_frame(with_field(ONE, 5, 1, kind))


@pytest.mark.parametrize("frame_bytes", [0, 8, 48, 56, 63, len(ONE) - 1, len(ONE) + 1])
def test_a_length_that_is_not_possible_is_refused(frame_bytes: int) -> None:
    with pytest.raises(
        ProtocolError, match=f"length {frame_bytes} is not a multiple of 8, or shorter"
    ):
        read_header(with_field(ONE, 8, 4, frame_bytes))


@pytest.mark.parametrize("frame_bytes", [64, len(ONE) - 8, len(ONE) + 8, 2**20])
def test_a_length_that_is_not_that_of_the_bytes_is_refused(frame_bytes: int) -> None:
    with pytest.raises(ProtocolError, match=f"length {frame_bytes} but {len(ONE)} bytes"):
        parse_message_frame(with_field(ONE, 8, 4, frame_bytes))


def test_a_length_over_the_limit_is_refused_before_the_checksum_is_counted() -> None:
    for frame_bytes in (8 * 2**20 + 8, 2**32 - 8):
        with pytest.raises(ProtocolError, match=f"length {frame_bytes} is over the limit"):
            parse_message_frame(with_field(ONE, 8, 4, frame_bytes))
