"""Valid bytes made invalid: the edits that a fuzz test draws, and checksums that fit afterwards.

Noise stops at the first checksum. What is drawn here reaches the parser behind it, as a file would
that another program wrote, or one of ours with a bug.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st

from qmq_client.wire.checksum import crc32c
from qmq_client.wire.frame import stamp_frame

_EXAMPLES: Final = 60
_EXAMPLES_BEFORE_A_RELEASE: Final = 20_000
#: The same examples in every run, but before a release.
IS_RELEASE: Final = bool(os.environ.get("QMQ_FUZZ_RELEASE"))
fuzzed = settings(
    max_examples=_EXAMPLES_BEFORE_A_RELEASE if IS_RELEASE else _EXAMPLES,
    derandomize=not IS_RELEASE,
    deadline=None,
    database=None,
)
#: Numbers at which fields of one, two, four and eight bytes turn over.
_EDGES: Final = [
    value.to_bytes(width, "big")
    for width in (1, 2, 4, 8)
    for value in (0, 1, 2 ** (8 * width - 1) - 1, 2 ** (8 * width - 1), 2 ** (8 * width) - 1)
]


class Edit(NamedTuple):
    """Replace `length` bytes from a place, told as a part of the whole, by others."""

    place: float
    length: int
    others: bytes

    def apply(self, content: bytes) -> bytes:
        first = round(self.place * len(content))
        return content[:first] + self.others + content[first + self.length :]


_edit = st.one_of(
    st.builds(Edit, st.floats(0, 1), st.integers(0, 8), st.binary(max_size=8)),
    st.builds(
        lambda place, edge: Edit(place, len(edge), edge), st.floats(0, 1), st.sampled_from(_EDGES)
    ),
    st.builds(Edit, st.floats(0, 1), st.integers(0, 400), st.just(b"")),
    st.builds(
        Edit, st.floats(0, 1), st.just(0), st.sampled_from([bytes(64), b"\xff" * 64, b"QMQF"])
    ),
)
edits = st.lists(_edit, min_size=1, max_size=4)


def edited(content: bytes, drawn: list[Edit]) -> bytes:
    """All edits, one after the other."""
    for edit in drawn:
        content = edit.apply(content)
    return content


def sealed(content: bytes) -> bytes:
    """A small file with a checksum line that fits."""
    return content + b"\ncrc32c %08x\n" % crc32c(content)


def unsealed(data: bytes) -> bytes:
    """The content of a small file."""
    return data[: data.rindex(b"\ncrc32c ")]


def stamped(frame: bytes, *, offset: int, epoch: int, first_sequences: tuple[int, ...]) -> bytes:
    """The same with a stamp of the log."""
    head = stamp_frame(
        frame,
        physical_offset=offset,
        stored_at_ms=1_700_000_000_000,
        epoch=epoch,
        durable_offset=offset,
        first_sequences=first_sequences,
    )
    return head + frame[len(head) :]
