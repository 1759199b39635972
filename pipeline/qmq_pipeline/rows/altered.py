"""Records whose bytes do not match the checksum that their producer computed.

A frame's own checksum says that the log holds what came to the broker. The record's says that this
is what the producer made: it is computed again from the bytes, so that whoever compares checksums
later compares contents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from qmq_client.wire.checksum import crc32c
from qmq_client.wire.columns import checksums, first_broken
from qmq_client.wire.record import record_message_id
from qmq_pipeline.rows.decode import SCHEDULED_KINDS, Piece

#: How many of a range are named; if a whole range is damaged, more would say nothing more.
ALTERED_MAX: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AlteredRecord:
    """One record that is not what its producer made, as JSON values."""

    message_id: str
    subject: str
    #: None while it is delayed.
    sequence: int | None
    stored_at_ms: int
    #: The producer's checksum, and that of its bytes.
    record_crc: int
    found_crc: int


def altered_records(piece: Piece) -> list[AlteredRecord]:
    """The altered records of one subject in one frame; mostly none."""
    seed, lengths = crc32c(piece.subject.encode()), piece.lengths.tolist()
    if first_broken(checksums(piece.data, lengths), seed) is None:
        return []
    found: list[AlteredRecord] = []
    position = 0
    for number, (record_crc, content) in enumerate(checksums(piece.data, lengths)):
        found_crc = crc32c(content, seed)
        if found_crc != record_crc:
            is_placed = piece.kind not in SCHEDULED_KINDS
            record = piece.data[position : position + lengths[number]]
            found.append(
                AlteredRecord(
                    message_id=record_message_id(bytes(record)).hex(),
                    subject=piece.subject,
                    sequence=piece.first_sequence + number if is_placed else None,
                    stored_at_ms=piece.stored_at_ms,
                    record_crc=record_crc,
                    found_crc=found_crc,
                )
            )
        position += lengths[number]
    return found
