"""Records whose bytes do not match the checksum that their producer computed.

A frame's own checksum says that the log holds what came to the broker. The record's says that this
is what the producer made: it is computed again from the bytes, so that whoever compares checksums
later compares contents.
"""

from __future__ import annotations

from collections.abc import Iterator

from qmq_client.wire.checksum import crc32c
from qmq_client.wire.columns import checksums, first_broken
from qmq_pipeline.rows.decode import Piece


def altered_records(piece: Piece) -> Iterator[tuple[tuple[int, int], int]]:
    """Of one subject in one frame: the frame's offset and the record's number, and the checksum of its bytes."""
    seed, lengths = crc32c(piece.subject.encode()), piece.lengths.tolist()
    if first_broken(checksums(piece.data, lengths), seed) is None:
        return
    for number, (record_crc, content) in enumerate(checksums(piece.data, lengths)):
        found_crc = crc32c(content, seed)
        if found_crc != record_crc:
            yield (piece.offset, piece.first_number + number), found_crc
