"""Columns out of many records at once say what the wire's own decoder says of each."""

from __future__ import annotations

import random
import struct
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmq_broker.storage.logs.frame_scan import ScannedFrame
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FrameKind
from qmq_client.wire.marks import Marks
from qmq_client.wire.names import OWN_PREFIX
from qmq_client.wire.record import (
    FLAGS_POSITION,
    KEY_BYTES_POSITION,
    KNOWN_FLAGS,
    BodyKind,
    Record,
    decode_record,
    encode_record,
)
from qmq_pipeline.rows.decode import Selection, batches
from qmq_pipeline.rows.log_rows import log_batches
from qmq_pipeline.tables.schemas import LOG, MESSAGES, SCHEDULED
from qmq_pipeline.tables.table import Table
from tests.pipeline.world import scanned

_NAMES = st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}\Z")
_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
_TIMES = st.integers(0, 253_402_300_799_999)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: Where a record says how many headers it has.
HEADER_COUNT = slice(26, 28)
#: Of which the fixed parts of records, and their lengths, are enough.
FIVE = ("subject", "sequence", "message_id", "stored_at", "body_bytes")

_RECORDS = st.builds(
    Record,
    message_id=st.binary(min_size=16, max_size=16),
    subject=st.sampled_from(["orders", "flight.departed", "a"]),
    body=st.binary(max_size=60),
    body_kind=st.sampled_from(list(BodyKind)),
    key=st.none() | _TEXT.filter(bool),
    tags=st.lists(_NAMES, max_size=4).map(tuple),
    headers=st.lists(st.tuples(_NAMES, _TEXT), max_size=4, unique_by=lambda pair: pair[0]).map(
        tuple
    ),
    born_at_ms=_TIMES,
    due_at_ms=st.none() | _TIMES,
    expires_at_ms=st.none() | _TIMES,
)


def rows_of(frame: ScannedFrame, selection: Selection | None = None) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for batch in batches([frame], selection or Selection()):
        batch.validate(full=True)
        rows += batch.to_pylist()
    return rows


def in_one_block(frames: list[ScannedFrame]) -> list[ScannedFrame]:
    """The same frames as if they had been read at once, one behind the other."""
    block = b"".join(frame.data for frame in frames)
    read: list[ScannedFrame] = []
    for frame in frames:
        first = sum(one.header.frame_bytes for one in read)
        read.append(ScannedFrame(frame.offset, frame.header, block, first))
    return read


def large_frames(count: int) -> list[ScannedFrame]:
    """Frames of 250 records of a KiB."""
    one = Record(message_id=bytes(16), subject="a", body=bytes(1024), born_at_ms=1)
    return [scanned([("a", encode_record(one))] * 250, offset=8 * n) for n in range(count)]


def time(time_ms: int | None) -> datetime | None:
    return None if time_ms is None else _EPOCH + timedelta(milliseconds=time_ms)


def expected(records: list[tuple[str, bytes]], offset: int) -> Iterator[dict[str, object]]:
    """What the rows must be, by the decoder of single records."""
    subjects = list(dict.fromkeys(subject for subject, _ in records))
    number = 0
    for subject in subjects:
        for sequence, data in enumerate(
            (one for name, one in records if name == subject), start=10
        ):
            record = decode_record(subject, data)
            yield {
                "subject": subject,
                "sequence": sequence,
                "physical_offset": offset,
                "record_number": number,
                "message_id": record.message_id.hex(),
                "producer": int.from_bytes(record.message_id[:8], signed=True),
                "counter": int.from_bytes(record.message_id[8:], signed=True),
                "record_crc": int.from_bytes(data[:4]),
                "key": record.key,
                "tags": list(record.tags),
                "headers": list(record.headers),
                "body_kind": int(record.body_kind),
                "born_at": time(record.born_at_ms),
                "stored_at": time(1_700_000_000_123),
                "due_at": time(record.due_at_ms),
                "expires_at": time(record.expires_at_ms),
                "body_bytes": len(record.body),
                "body": record.body,
            }
            number += 1


@settings(max_examples=60, deadline=None)
@given(st.lists(_RECORDS, min_size=1, max_size=12))
def test_rows_are_what_the_decoder_of_single_records_says(records: list[Record]) -> None:
    encoded = [(record.subject, encode_record(record)) for record in records]
    assert rows_of(scanned(encoded)) == list(expected(encoded, 4096))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(_RECORDS, st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=5)
)
def test_bytes_that_are_no_records_become_rows_and_never_an_error(
    damaged: list[tuple[Record, int, int]],
) -> None:
    encoded = []
    for record, position, value in damaged:
        data = bytearray(encode_record(record))
        known = KNOWN_FLAGS[value % len(KNOWN_FLAGS)]
        data[min(position, len(data) - 1)] = known if position == FLAGS_POSITION else value
        encoded.append((record.subject, bytes(data)))
    try:
        frame = scanned(encoded)
    except ValueError:  # the frame's own tags column cannot be made of it
        return
    rows = rows_of(frame)
    assert [row["record_number"] for row in rows] == list(range(len(encoded)))


def test_headers_that_do_not_add_up_are_left_out_and_what_ends_before_its_body_is_no_record() -> (
    None
):
    record = Record(
        message_id=bytes(16), subject="a", body=b"body", headers=(("h", "vv"),), born_at_ms=1
    )
    data = encode_record(record)
    at_headers_bytes = 24  # where `record.py` writes it
    header_bytes = int.from_bytes(data[at_headers_bytes:][:2])
    longer = with_bytes(data, at_headers_bytes, (header_bytes + 1).to_bytes(2))
    shorter = with_bytes(data, at_headers_bytes, (header_bytes - 1).to_bytes(2))
    strange = with_bytes(data, at_headers_bytes, b"\xff\xff")
    rows = rows_of(scanned([("a", one) for one in (data, longer, shorter, strange)]))
    assert [row["headers"] for row in rows] == [[("h", "vv")], [], [], []]
    assert [row["body"] for row in rows[:3]] == [b"body", b"ody", b"vbody"]
    assert [row["body_kind"] for row in rows] == [0, 0, 0, -1]
    assert rows[3]["body"] == data[36:]


def with_bytes(data: bytes, position: int, other: bytes) -> bytes:
    return data[:position] + other + data[position + len(other) :]


def test_text_that_is_not_utf_8_is_replaced_and_read_on() -> None:
    record = Record(
        message_id=bytes(16),
        subject="a",
        body=b"body",
        key="xx",
        headers=(("h", "vv"),),
        born_at_ms=1,
    )
    data = encode_record(record).replace(b"xx", b"\xff\xfe").replace(b"vv", b"\xc3\x28")
    (row,) = rows_of(scanned([("a", data)]))
    assert (row["key"], row["headers"], row["body"]) == ("��", [("h", "�(")], b"body")


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("subjects", [None, frozenset({"orders"})])
def test_frames_that_were_read_at_once_have_the_rows_of_frames_by_themselves(
    seed: int, subjects: frozenset[str] | None
) -> None:
    draw = random.Random(seed)
    frames = []
    for number in range(6):
        kind = draw.choice([FrameKind.MESSAGES, FrameKind.DELAYED])
        records = [
            Record(
                message_id=draw.randbytes(16),
                subject=draw.choice(["orders", "flight.departed", "a"]),
                key=draw.choice([None, "k", "key"]),
                headers=draw.choice([(), (("h", "value"),), (("h", ""), ("other", "v"))]),
                body=draw.randbytes(draw.randrange(60)),
                born_at_ms=draw.randrange(10**12),
                due_at_ms=draw.randrange(10**12) if kind is FrameKind.DELAYED else None,
            )
            for _ in range(draw.randint(1, 5))
        ]
        encoded = [(one.subject, encode_record(one)) for one in records]
        frames.append(scanned(encoded, kind=kind, offset=8 * number))
    cut = draw.randrange(6)
    read = in_one_block(frames[:cut]) + in_one_block(frames[cut:])
    for table in (MESSAGES, SCHEDULED):
        selection = Selection(subjects=subjects, table=table, columns=table.names)
        found = [row for batch in batches(read, selection) for row in batch.to_pylist()]
        assert found == [row for frame in frames for row in rows_of(frame, selection)]


def test_a_batch_ends_with_what_was_read_at_once_if_that_is_enough() -> None:
    frames = in_one_block(large_frames(4)) + in_one_block(large_frames(4))
    assert [batch.num_rows for batch in batches(frames, Selection())] == [1_000, 1_000]
    few = in_one_block(large_frames(1)) + in_one_block(large_frames(1))
    assert [batch.num_rows for batch in batches(few, Selection())] == [500]


@pytest.mark.parametrize(
    "columns", [("subject",), FIVE, ("subject", "key", "tags", "headers", "due_at")]
)
def test_a_batch_without_bodies_continues_behind_its_block_and_does_not_keep_it(
    columns: tuple[str, ...],
) -> None:
    frames = large_frames(4)
    block_bytes = sum(frame.header.frame_bytes for frame in frames)

    def read() -> Iterator[ScannedFrame]:
        for _ in range(12):
            yield from in_one_block(frames)

    selection = Selection(columns=columns)
    list(batches(read(), selection))  # what is made once
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        rows = [batch.num_rows for batch in batches(read(), selection)]
        held = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert rows == [5_000, 5_000, 2_000]
    # The block that is read, its predecessor until the next frame comes, and what is wanted of five.
    assert held < 3 * block_bytes


@pytest.mark.parametrize("table", [MESSAGES, SCHEDULED])
def test_every_column_alone_is_the_one_of_whole_rows_however_the_log_was_read(table: Table) -> None:
    frames = [frame_of_all_kinds(random.Random(seed), 8 * seed, table) for seed in range(9)]
    blocks = [in_one_block(frames[first : first + 3]) for first in (0, 3, 6)]
    read = [frame for block in blocks for frame in block]
    whole = [
        row
        for frame in frames
        for row in rows_of(frame, Selection(table=table, columns=table.names))
    ]
    assert {row["body_kind"] for row in whole} == {-1, 0, 1, 2}
    for name in table.names:
        (batch,) = batches(read, Selection(table=table, columns=(name,)))
        batch.validate(full=True)
        assert batch.column(name).to_pylist() == [row[name] for row in whole], name


def frame_of_all_kinds(draw: random.Random, offset: int, table: Table) -> ScannedFrame:
    """Records with and without each part, and one that is none."""
    records = [
        Record(
            message_id=draw.randbytes(16),
            subject=draw.choice(["orders", "a"]),
            body=draw.randbytes(draw.randrange(60)),
            body_kind=draw.choice(list(BodyKind)),
            key=draw.choice([None, "k", "key"]),
            tags=draw.choice([(), ("one",), ("one", "two")]),
            headers=draw.choice([(), (("h", "value"),), (("h", ""), ("other", "v"))]),
            born_at_ms=draw.randrange(10**12),
            due_at_ms=draw.randrange(10**12) if table is SCHEDULED else None,
            expires_at_ms=draw.choice([None, draw.randrange(10**12)]),
        )
        for _ in range(8)
    ]
    encoded = [(one.subject, encode_record(one)) for one in records]
    strange = Record(message_id=draw.randbytes(16), subject="a", body=b"body", born_at_ms=1)
    encoded.append(("a", with_bytes(encode_record(strange), KEY_BYTES_POSITION, b"\xff")))
    if table is MESSAGES:
        return scanned(encoded, offset=offset)
    if draw.randrange(2):
        return scanned(encoded, offset=offset, kind=FrameKind.DELAYED)
    numbers = range(len(encoded))
    due_at_ms = [draw.randrange(10**12) for _ in numbers]
    marks = Marks(buckets=numbers, sequences=numbers, sources=numbers, due_at_ms=due_at_ms)
    return scanned(encoded, offset=offset, kind=FrameKind.RESCHEDULED, marks=marks)


def test_bodies_that_are_not_asked_for_are_not_copied() -> None:
    frames = in_one_block(large_frames(4))
    selection = Selection(columns=FIVE)
    list(batches(frames, selection))  # what is made once
    tracemalloc.start()
    try:
        (batch,) = batches(frames, selection)
        assert tracemalloc.get_traced_memory()[1] < len(frames[0].block) // 2
    finally:
        tracemalloc.stop()
    assert batch.num_rows == 1_000


@pytest.mark.parametrize("columns", [MESSAGES.names, FIVE, ("key",)])
@pytest.mark.parametrize("length", [7, 10_000])
def test_records_longer_than_their_frame_or_too_short_for_one_are_refused(
    length: int, columns: tuple[str, ...]
) -> None:
    records = [Record(message_id=bytes(16), subject="a", body=b"body", born_at_ms=1)] * 3
    frame = scanned([("a", encode_record(one)) for one in records])
    own = len(encode_record(records[0]))
    told = struct.pack(">3I", own, own, own)
    assert frame.data.count(told) == 1
    wrong = frame.data.replace(told, struct.pack(">3I", own, own, length))
    frame = ScannedFrame(frame.offset, frame.header, wrong)
    for made, table in ((batches, MESSAGES), (log_batches, LOG)):
        with pytest.raises(ProtocolError, match="do not add up"):
            list(made([frame], Selection(columns=columns, table=table)))
    sound = scanned([("a", encode_record(records[0]))])
    with pytest.raises(ProtocolError, match="do not add up"):
        list(batches([frame, sound], Selection(columns=columns)))


def test_a_false_claim_of_many_headers_costs_no_work_for_each() -> None:
    data = bytearray(
        encode_record(Record(message_id=bytes(16), subject="a", body=b"", born_at_ms=1))
    )
    data[HEADER_COUNT] = b"\xff\xff"
    frame = scanned([("a", bytes(data))])
    steps = 0

    def on_step(*_: object) -> None:
        nonlocal steps
        steps += 1

    sys.setprofile(on_step)
    try:
        rows = rows_of(frame)
    finally:
        sys.setprofile(None)
    assert [row["headers"] for row in rows] == [[]]
    assert steps < 0xFFFF


def test_only_the_columns_and_subjects_asked_for_are_made() -> None:
    records = [
        Record(message_id=bytes([n]) * 16, subject=f"s{n % 3}", body=b"", born_at_ms=1)
        for n in range(9)
    ]
    frame = scanned([(one.subject, encode_record(one)) for one in records])
    wanted = Selection(columns=("sequence", "subject"), subjects=frozenset({"s1"}))
    assert rows_of(frame, wanted) == [{"sequence": 10 + n, "subject": "s1"} for n in range(3)]
    late = Selection(columns=("subject",), first_stored_at_ms=1_700_000_000_124)
    assert rows_of(frame, late) == []
    own = scanned([(OWN_PREFIX + "copies", b"x" * 40)])
    assert rows_of(own, Selection(subjects=frozenset({OWN_PREFIX + "copies"}))) == []


def test_delayed_messages_are_rows_of_another_table_without_a_sequence() -> None:
    record = Record(message_id=bytes(16), subject="a", body=b"", born_at_ms=1, due_at_ms=5)
    frame = scanned([("a", encode_record(record))], kind=FrameKind.DELAYED)
    assert rows_of(frame) == []
    (row,) = rows_of(frame, Selection(table=SCHEDULED, columns=SCHEDULED.names))
    assert (row["sequence"], row["due_at"]) == (None, time(5))
    assert list(row) == list(SCHEDULED.names)
    assert row["now_due_at"] == time(5)


@given(st.lists(st.lists(_RECORDS, min_size=1, max_size=6), max_size=6))
@settings(max_examples=60, deadline=None)
def test_rows_of_the_log_are_those_of_messages_without_those_of_the_broker_itself(
    frames: list[list[Record]],
) -> None:
    own = OWN_PREFIX + "copies"
    some = [
        scanned([(one.subject, encode_record(one)) for one in records] + [(own, b"x" * 40)])
        for records in frames
    ]
    plain = [row for frame in some for row in rows_of(frame)]
    selection = Selection(table=LOG, columns=(*MESSAGES.names, "kind", "part"), part_bytes=1024)
    found = [row for batch in log_batches(some, selection) for row in batch.to_pylist()]
    assert [{name: row[name] for name in MESSAGES.names} for row in found] == plain
    assert {(row["kind"], row["part"]) for row in found} <= {("message", 4)}


def test_a_message_that_was_put_off_is_due_when_its_frame_says() -> None:
    due = Record(message_id=bytes(16), subject="a", body=b"", born_at_ms=1, due_at_ms=5)
    marks = Marks(buckets=[0], sequences=[0], sources=[0], due_at_ms=[9_000])
    put_off = scanned([("a", encode_record(due))], kind=FrameKind.RESCHEDULED, marks=marks)
    selection = Selection(table=SCHEDULED, columns=SCHEDULED.names)
    of_log = replace(selection, table=LOG, columns=LOG.names)
    for rows in (batches([put_off], selection), log_batches([put_off], of_log)):
        (row,) = [row for batch in rows for row in batch.to_pylist()]
        assert (row["due_at"], row["now_due_at"]) == (time(5), time(9_000))
