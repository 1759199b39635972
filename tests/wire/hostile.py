"""Makes hostile bytes: what a broken or malicious sender could put on the wire.

Altering a byte mostly ends at a checksum. `reseal_frame` and `reseal_record` make the checksums right
again, so that the checks behind them are reached.
"""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator

import hypothesis.strategies as st
from hypothesis import settings

from qmq_client.wire.checksum import crc32c
from qmq_client.wire.frame import FRAME_HEADER_BYTES, SEQUENCE_BYTES
from qmq_client.wire.record import TIME_MAX_MS, BodyKind, Record

#: What a field of these widths is set to: edges of signed and unsigned fields, and near misses.
EXTREMES = {
    1: (0, 1, 2, 3, 7, 127, 128, 254, 255),
    2: (0, 1, 2, 127, 128, 255, 256, 1023, 1024, 1025, 32767, 32768, 65534, 65535),
    4: (0, 1, 35, 36, 37, 255, 4095, 4096, 10**4, 10**4 + 1, 2**31 - 1, 2**31, 2**32 - 8, 2**32 - 1),
    8: (0, 1, 2**31, 2**32 - 1, 2**32, TIME_MAX_MS, TIME_MAX_MS + 1, 2**63 - 1, 2**63, 2**64 - 1),
}  # fmt: skip
_FORMAT = {1: ">B", 2: ">H", 4: ">I", 8: ">Q"}

NAME_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"
NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,20}\Z", fullmatch=True)
#: Any text that UTF-8 can say.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
TIMES_MS = st.integers(0, TIME_MAX_MS)


def examples(count: int) -> settings:
    """So many examples."""
    return settings(max_examples=count)


def records(*, subject: st.SearchStrategy[str] = NAMES) -> st.SearchStrategy[Record]:
    """Records within the default limits."""
    return st.builds(
        Record,
        message_id=st.binary(min_size=16, max_size=16),
        subject=subject,
        body=st.binary(max_size=200),
        body_kind=st.sampled_from(BodyKind),
        key=st.none() | TEXTS.filter(lambda key: key and "\0" not in key),
        tags=st.lists(NAMES, max_size=5).map(tuple),
        headers=st.dictionaries(NAMES, TEXTS, max_size=5).map(lambda pairs: tuple(pairs.items())),
        born_at_ms=TIMES_MS,
        due_at_ms=st.none() | TIMES_MS,
        expires_at_ms=st.none() | TIMES_MS,
    )


def reseal_frame(data: bytes) -> bytes:
    """The frame with its length and body checksum made right for its bytes, when it has a header."""
    if len(data) < FRAME_HEADER_BYTES:
        return data
    sent = data[:8] + struct.pack(">I", len(data)) + data[12:16]
    (subject_count,) = struct.unpack_from(">H", data, 6)
    head_bytes = FRAME_HEADER_BYTES + SEQUENCE_BYTES * subject_count
    crc = crc32c(data[head_bytes:], crc32c(sent))
    return sent + struct.pack(">I", crc) + data[20:]


def reseal_record(subject: str, data: bytes) -> bytes:
    """The record with its checksum made right for its bytes."""
    return struct.pack(">I", crc32c(data[4:], crc32c(subject.encode()))) + data[4:]


def with_field(data: bytes, position: int, width: int, value: int) -> bytes:
    """The bytes with one big-endian field set."""
    return data[:position] + struct.pack(_FORMAT[width], value) + data[position + width :]


def extreme_fields(data: bytes, first: int = 0) -> Iterator[bytes]:
    """The bytes with each extreme value in a field of each width at each position."""
    for width, values in EXTREMES.items():
        for position in range(first, len(data) - width + 1):
            for value in values:
                yield with_field(data, position, width, value)


def mutate(data: bytes, source: random.Random) -> bytes:
    """A few structured changes: fields, runs cut, doubled, swapped or overwritten."""
    for _ in range(source.randint(1, 4)):
        if not data:
            return data
        first = source.randrange(len(data))
        after = min(len(data), first + source.choice((1, 2, 4, 8, 16, 64)))
        match source.randrange(6):
            case 0:
                data = data[:first] + data[after:]
            case 1:
                data = data[:after] + data[first:after] + data[after:]
            case 2:
                data = data[:first] + source.randbytes(after - first) + data[after:]
            case 3:
                data = data[:first] + bytes(after - first) + data[after:]
            case 4:
                other = source.randrange(len(data))
                data = data[:first] + data[other : other + after - first] + data[first:]
            case _:
                width = source.choice([width for width in EXTREMES if width <= len(data)])
                position = source.randrange(len(data) - width + 1)
                data = with_field(data, position, width, source.choice(EXTREMES[width]))
    return data


def aligned(data: bytes) -> bytes:
    """The bytes cut to whole multiples of eight, so that a frame's length can be made right."""
    return data[: len(data) - len(data) % 8]


def peak_bytes(call: Callable[[], object]) -> int:
    """Most memory that `call` held at once."""
    call()  # what is made once and kept (caches, compiled formats) is no cost of the input
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
