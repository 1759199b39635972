"""The tag hash: 64 bits that say cheaply which tags a message may have.

Each tag sets two bits chosen by its CRC-32C (a Bloom signature), so that one 8-byte field of the
consume queue answers AND and OR filters over several tags; a match is confirmed on the text. 0
means no tags.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from qmq_client.wire.checksum import crc32c


@lru_cache(maxsize=4096)
def _bits(tag: bytes) -> int:
    value = crc32c(tag)
    return (1 << (value & 63)) | (1 << ((value >> 6) & 63))


def tag_hash(tags: Iterable[bytes]) -> int:
    """The hash of a message with these encoded tags, 0 … 2⁶⁴-1."""
    value = 0
    for tag in tags:
        value |= _bits(tag)
    return value


#: Combinations of tags kept at hand; an application has few, a frame has thousands of messages.
_JOINED_KEPT_MAX: Final = 1024


@lru_cache(maxsize=_JOINED_KEPT_MAX)
def joined_tags_hash(joined: bytes) -> int:
    """The hash of tags as they stand in a record: encoded and joined by commas."""
    return tag_hash(joined.split(b","))
