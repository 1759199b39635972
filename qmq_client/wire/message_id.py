"""Message ids: 64 bits of producer instance and a 64-bit dense counter, shown as 32 hex digits.

The instance is random for each process start and fork, so ids need no coordination; the counter is
dense, so that windows of ids and audits of losses work on intervals instead of single ids.
The id exists before the transaction commits and never changes on a second attempt.

A dedupe id is derived from a name that the application gives, so that a business transaction that
is run twice creates the same id twice::

    offset bytes field
    0      2     marker de d0; no random instance begins with it
    2      14    the first 112 bits of SHA-256 over subject, a zero byte, dedupe key (UTF-8)

Documented for people in `docs/format/record.md`.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable
from itertools import count, repeat
from typing import Final

from qmq_client.wire.errors import InvalidMessageError
from qmq_client.wire.shown import shorten

MESSAGE_ID_BYTES: Final = 16
_HALVES: Final = struct.Struct(">QQ")
_TEXT: Final = re.compile(r"[0-9a-f]{32}\Z")
_COPY: Final = "Copy it from a receipt, a log line or `qmq outbox list`."
#: The remedy for an invalid id of a message.
LEAVE_OUT: Final = "Leave it out to have one made."
INSTANCE_MAX: Final = 2**64 - 1
#: First bytes of an id that is derived from a dedupe key.
DEDUPE_MARKER: Final = b"\xde\xd0"
#: If a random instance begins with the marker, this bit of it is inverted.
_MARKER_BIT: Final = 1 << 63
_MARKER_SHIFT: Final = 48


class MessageIds:
    """Dense ids of one producer instance.

    Safe for any number of threads without a lock: each takes its number in one step. With a lock,
    two threads that make a frame each would wait for each other at every message.
    """

    __slots__ = ("next_id",)

    #: The next id, 16 bytes big-endian. Not a method, because it is called for each message and
    #: runs without Python code.
    next_id: Callable[[], bytes]

    def __init__(self, instance: int, *, first_counter: int = 0) -> None:
        """Requires: `instance` from a source of randomness, 0 … 2⁶⁴-1."""
        if not 0 <= instance <= INSTANCE_MAX:
            raise ValueError(f"instance {instance} is not an unsigned 64-bit number")
        self.next_id = map(_HALVES.pack, repeat(instance), count(first_counter)).__next__


def instance_of(random_bits: int) -> int:
    """A producer instance from 64 random bits that does not collide with ids of dedupe keys."""
    if random_bits >> _MARKER_SHIFT == int.from_bytes(DEDUPE_MARKER):
        return random_bits ^ _MARKER_BIT
    return random_bits


def dedupe_message_id(subject: str, dedupe_key: str) -> bytes:
    """The id that every message of this subject and dedupe key has.

    Among 2²⁸ keys the chance that two have the same id is below 2⁻⁵⁶. Requires: a valid subject,
    which has no zero byte, and a key that can be encoded.
    """
    text = subject.encode() + b"\0" + dedupe_key.encode()
    rest_bytes = MESSAGE_ID_BYTES - len(DEDUPE_MARKER)
    return DEDUPE_MARKER + hashlib.sha256(text).digest()[:rest_bytes]


def is_dedupe_id(message_id: bytes) -> bool:
    """Whether the id is derived from a dedupe key: the same id then means the same message."""
    return message_id.startswith(DEDUPE_MARKER)


def split_message_id(message_id: bytes) -> tuple[int, int]:
    """Instance and counter of a 16-byte id."""
    instance, counter = _HALVES.unpack(message_id)
    return instance, counter


#: The text form of a 16-byte id: 32 hex digits.
format_message_id: Final[Callable[[bytes], str]] = bytes.hex


def parse_message_id(text: object, *, remedy: str = _COPY) -> bytes:
    """The 16 bytes of an id in text form; raises `InvalidMessageError` with this remedy."""
    if isinstance(text, str) and _TEXT.match(text) is not None:
        return bytes.fromhex(text)
    raise InvalidMessageError(
        field="message_id",
        limit="32 lower-case hex digits",
        value=shorten(text),
        remedy=remedy,
    )
