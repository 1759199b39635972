"""The answer to a pull: delivered messages, as one DELIVERIES frame.

Body: length 4 and MessagePack of `DeliveriesHead`; then record lengths (4 n) and the records as
they are in the commit log. Values that differ per run (sequence, attempt) are in the head once per
run, so nothing is encoded per message. Pull sequences are dense from `first_pull_sequence` in the
order of the records.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice
from typing import Final, overload

import msgspec

from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FRAME_ALIGNMENT_BYTES, FrameKind, build_frame, parse_frame
from qmq_client.wire.record import RECORD_FIXED_BYTES
from qmq_client.wire.requests import Natural, decode_msgpack, sized_part

_LENGTH: Final = struct.Struct(">I")


class DeliveryRun(msgspec.Struct, frozen=True, array_like=True):
    """Messages with consecutive sequences and the same number of attempts."""

    first_sequence: Natural
    count: Natural
    #: The attempt: how many times these messages were delivered to this group, including this one.
    attempt: Natural


class DeliveriesHead(msgspec.Struct, frozen=True, kw_only=True):
    """Values that all messages of one answer share."""

    subject: str
    #: The broker's token at the delivery; settlements name it.
    token: Natural
    lease_ms: Natural
    first_pull_sequence: Natural
    runs: tuple[DeliveryRun, ...]
    #: Ranges of the request's settlements that were refused: (token, first, next).
    stale: tuple[tuple[Natural, Natural, Natural], ...] = ()


class Delivered(msgspec.Struct, frozen=True, gc=False):
    """One message of an answer, still encoded; a struct, because one is made for every message.

    It is not tracked by the garbage collector, because it cannot be part of a reference cycle.
    """

    sequence: int
    pull_sequence: int
    attempt: int
    record: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliveries:
    """One answer to a pull."""

    head: DeliveriesHead
    messages: tuple[Delivered, ...]


class Records(Sequence[bytes]):
    """Encoded records in the order they were asked for; a single record is sliced only when it is accessed."""

    __slots__ = ("_counts", "lengths", "parts")

    def __init__(
        self, parts: Sequence[bytes | memoryview], counts: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Requires: each part holds as many records, back to back, as its count says."""
        #: Together, the bytes of all records.
        self.parts = parts
        self._counts = counts
        #: The length of each record.
        self.lengths = lengths

    @classmethod
    def of(cls, records: Sequence[bytes]) -> Records:
        """A `Records` of these records, one part for each."""
        return cls(records, [1] * len(records), list(map(len, records)))

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[bytes]:
        for part, lengths in self._stretches():
            first = 0
            for length in lengths:
                yield bytes(part[first : first + length])
                first += length

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        return list(self)[index]

    def column(self, place: int) -> bytes:
        """The byte at `place` of each record. Requires: every record is long enough."""
        cut = []
        for part, lengths in self._stretches():
            if _is_even(lengths):
                cut.append(bytes(part[place :: lengths[0]]))
            else:
                positions = accumulate(lengths[:-1], initial=place)
                cut.append(bytes([part[position] for position in positions]))
        return b"".join(cut)

    def _stretches(self) -> Iterator[tuple[bytes | memoryview, Sequence[int]]]:
        first = 0
        for part, records in zip(self.parts, self._counts, strict=True):
            yield part, self.lengths[first : first + records]
            first += records


def _is_even(lengths: Sequence[int]) -> bool:
    return lengths.count(lengths[0]) == len(lengths)


def build_deliveries(
    head: DeliveriesHead, lengths: Sequence[int], records: Iterable[bytes | memoryview]
) -> bytes:
    """The answer's bytes.

    `records` may be slices that hold several neighbouring records each; `lengths` has one number
    per record. Requires: lengths add up to the records, runs add up to the number of lengths.
    """
    content = msgspec.msgpack.encode(head)
    return build_frame(
        FrameKind.DELIVERIES,
        _LENGTH.pack(len(content)),
        content,
        struct.pack(f">{len(lengths)}I", *lengths),
        *records,
        record_count=len(lengths),
    )


def parse_deliveries(data: bytes, *, frame_bytes_max: int) -> Deliveries:
    """The messages of an answer; raises `ProtocolError` and nothing else."""
    header = parse_frame(data, frame_bytes_max=frame_bytes_max)
    if header.kind is not FrameKind.DELIVERIES:
        raise ProtocolError(
            f"a frame of kind {header.kind.name} is not an answer to a pull", offset=5
        )
    content = sized_part(data, header.head_bytes)
    head = decode_msgpack(content, DeliveriesHead)
    record_count = header.record_count
    position = header.head_bytes + _LENGTH.size + len(content)
    if position + 4 * record_count > len(data):
        raise ProtocolError("answer ends inside its record lengths", offset=position)
    lengths = struct.unpack_from(f">{record_count}I", data, position)
    if sum(run.count for run in head.runs) != record_count:
        raise ProtocolError("runs do not add up to the records", offset=position)
    first_position = position + 4 * record_count
    fill_bytes = len(data) - first_position - sum(lengths)
    if not 0 <= fill_bytes < FRAME_ALIGNMENT_BYTES or any(data[len(data) - fill_bytes :]):
        raise ProtocolError("record lengths do not add up to the answer", offset=position)
    # An empty record would cost the reader far more memory than the four bytes of its length.
    if lengths and min(lengths) < RECORD_FIXED_BYTES:
        raise ProtocolError(f"record shorter than {RECORD_FIXED_BYTES} bytes", offset=position)
    return Deliveries(head=head, messages=tuple(_messages(data, head, lengths, first_position)))


def _messages(
    data: bytes, head: DeliveriesHead, lengths: tuple[int, ...], first: int
) -> list[Delivered]:
    messages: list[Delivered] = []
    pull_sequence = head.first_pull_sequence
    remaining = iter(lengths)
    for run in head.runs:
        attempt = run.attempt
        # Positional arguments: keyword arguments take half as long again, for every message.
        for sequence, length in zip(count(run.first_sequence), islice(remaining, run.count)):
            after = first + length
            messages.append(Delivered(sequence, pull_sequence, attempt, data[first:after]))
            first = after
            pull_sequence += 1
    return messages


#: Annotations are resolved at import; see the end of `requests.py`.
_READ_NOW: Final = msgspec.msgpack.Decoder(DeliveriesHead)
