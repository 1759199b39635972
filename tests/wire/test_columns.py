"""Columns cut out of a frame are what its records say one by one, whatever their lengths."""

from __future__ import annotations

import pytest

from qmq_client.wire.checksum import crc32c
from qmq_client.wire.columns import byte_column, checksums
from qmq_client.wire.frame import MessageFrame, build_message_frame, parse_message_frame
from qmq_client.wire.record import Record, encode_record

LENGTHS = {
    "one": (5,),
    "of one length": (7, 7, 7, 7),
    "the last is longer": (7, 7, 8),
    "of many lengths": tuple(range(0, 300, 13)),
}


def frame_of(lengths: tuple[int, ...]) -> MessageFrame:
    """A frame of two subjects, half of the records in each."""
    records = [
        encode_record(
            Record(
                message_id=index.to_bytes(16),
                subject="one" if 2 * index < len(lengths) else "two",
                born_at_ms=1,
                body=bytes([index]) * length,
            )
        )
        for index, length in enumerate(lengths)
    ]
    half = (len(records) + 1) // 2
    runs = {"one": records[:half], "two": records[half:]}
    return parse_message_frame(
        build_message_frame({name: run for name, run in runs.items() if run})
    )


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_columns_are_what_the_records_say_one_by_one(lengths: tuple[int, ...]) -> None:
    frame = frame_of(lengths)
    records = list(frame.records())
    for place in (0, 20, 30):
        assert byte_column(frame, place) == bytes(record[place] for _, record in records)
    after = frame.positions[-1] + frame.lengths[-1]
    columns = list(checksums(frame.data[frame.positions[0] : after], frame.lengths))
    assert columns == [(int.from_bytes(record[:4]), record[4:]) for _, record in records]
    for (subject, _), (checksum, content) in zip(records, columns, strict=True):
        assert crc32c(content, crc32c(subject.encode())) == checksum
