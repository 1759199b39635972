"""Limits of messages and frames, each with its name, unit and reason.

The constants are fixed; `Limits` can be configured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: A name is also a directory name of at most twice its length (see `storage/files/layout.py`), and file
#: systems allow 255 bytes.
NAME_BYTES_MAX: Final = 127
#: The key length is one byte of the record.
KEY_BYTES_MAX: Final = 255
#: The subject table's count is two bytes; 1,024 keeps a request's work per subject small.
SUBJECTS_PER_FRAME_MAX: Final = 1024

DAY_MS: Final = 24 * 3_600_000
#: Tables around a lone record, rounded up: header 56, sequence 8, subject 132, lengths 12, fill 7.
FRAME_OVERHEAD_BYTES_MAX: Final = 256
#: Highest values of the settings; the fields of the formats can hold them.
_HIGHEST: Final = {
    "record_bytes": 1024 * 1024 * 1024,
    "tags": 64,
    "headers": 65_535,
    "headers_bytes": 65_535,
    "frame_bytes": 1024 * 1024 * 1024,
    "records_per_frame": 1_000_000,
    "delay_ms": 100 * 366 * DAY_MS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes and counts of one message and one frame. Configure the same for broker and clients."""

    #: Longest record (headers, key, tags and body with 36 bytes of fixed fields).
    record_bytes: int = 4 * 1024 * 1024
    #: Tags of one message; more would saturate the 64-bit tag hash.
    tags: int = 16
    #: Headers of one message.
    headers: int = 64
    #: All header names and values of one message together, with 3 bytes for each pair.
    headers_bytes: int = 16 * 1024
    #: Longest frame. A frame is one request; after a crash all of it is there, or no part.
    frame_bytes: int = 8 * 1024 * 1024
    #: Records of one frame; bounds the work that one request may cause.
    records_per_frame: int = 10_000
    #: How far ahead a message may be due: two years. A later time is refused, not reduced.
    delay_ms: int = 2 * 366 * DAY_MS

    def __post_init__(self) -> None:
        for field, highest in _HIGHEST.items():
            value = getattr(self, field)
            if not 1 <= value <= highest:
                raise ValueError(f"limit {field}: {value}; allowed: 1 to {highest}")
        if self.record_bytes + FRAME_OVERHEAD_BYTES_MAX > self.frame_bytes:
            raise ValueError(
                f"limit record_bytes: {self.record_bytes} does not fit a frame of "
                f"{self.frame_bytes} bytes; leave {FRAME_OVERHEAD_BYTES_MAX} bytes for its tables"
            )


DEFAULT_LIMITS: Final = Limits()
