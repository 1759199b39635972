"""Copies of messages for long retries, as stored in the commit log.

A *copy* is a delayed message of the broker's internal subject `COPIES`. Its body is one MessagePack
array: the group, the message, the retry's id (see `SetAside` in `actions.py`), and the original record
as its producer made it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.limits import Limits
from qmq_client.wire.names import COPIES
from qmq_client.wire.record import Record, decode_record, encode_record, verify_record

#: A copy is longer than the longest record.
_LIMITS: Final = Limits(record_bytes=512 * 1024 * 1024, frame_bytes=1024 * 1024 * 1024)


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """The body of a copy."""

    subject: str
    group: str
    #: Sequence of the original.
    sequence: int
    retry_id: int
    record: bytes


def pack_copy(copy: Copy, *, message_id: bytes, made_at_ms: int, due_at_ms: int) -> bytes:
    """A copy as the record of a delayed message."""
    return encode_record(
        Record(
            message_id=message_id,
            subject=COPIES,
            body=msgspec.msgpack.encode(copy),
            born_at_ms=made_at_ms,
            due_at_ms=due_at_ms,
        ),
        _LIMITS,
    )


def unpack_copy(record: bytes) -> Copy:
    """The copy in a record; raises `CorruptionError`."""
    try:
        return msgspec.msgpack.decode(decode_record(COPIES, record).body, type=Copy)
    except (ProtocolError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _damaged(str(error)) from error


def original_record(record: bytes, subject: str) -> bytes:
    """The whole record that was copied; raises `CorruptionError`."""
    original = unpack_copy(record).record
    try:
        verify_record(subject, original)
    except ProtocolError as error:
        raise _damaged(str(error)) from error
    return original


def _damaged(reason: str) -> CorruptionError:
    return CorruptionError(
        segment=layout.COMMIT_LOG, offset=0, reason=f"the copy is damaged: {reason}"
    )
