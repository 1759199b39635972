"""Where the messages of a group stand: in the queue of their subject, or as copies in that of copies.

A message that was set aside comes back as a copy, since the retention may have taken the original by
then. A *copy* is a message of the broker's own subject `COPIES` with the original record in its body
and, before it, whose it is; outside this floor nobody sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from qmq_broker.errors import CorruptionError
from qmq_broker.service.delivery.groups import GroupState
from qmq_broker.storage.files import layout
from qmq_broker.storage.queues.consume_queue import ConsumeQueue, Entry
from qmq_broker.storage.store import Store
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
    ticket: int
    record: bytes


class _CopyEntry(Entry):
    """An entry of the queue of copies."""


class GroupQueue:
    """The queue of a subject as one group reads it. Reads only."""

    def __init__(self, store: Store, state: GroupState, queue: ConsumeQueue) -> None:
        self._own = queue
        self._copies = state.aside.copies
        self._copy_queue = store.queue(COPIES) if self._copies else None
        self.first_sequence = queue.first_sequence
        self.next_sequence = queue.next_sequence

    def entries(self, first_sequence: int, count: int) -> list[Entry]:
        """Up to `count` visible entries from `first_sequence` on, at least one where there is one."""
        copies = self._copies
        if not copies:
            return self._own.entries(first_sequence, count)
        if first_sequence in copies:
            return [self._copy(copies[first_sequence])]
        wanted = range(first_sequence, first_sequence + count)
        before = next((index for index, one in enumerate(wanted) if one in copies), count)
        return self._own.entries(first_sequence, before)

    def _copy(self, sequence: int) -> Entry:
        queue = self._copy_queue
        found = [] if queue is None else queue.entries(sequence, 1)
        # One that was given up by force is as good as lost.
        return _CopyEntry(*found[0]) if found else _CopyEntry(0, 0, 0)


def group_queue(store: Store, state: GroupState) -> GroupQueue | None:
    """The queue of a group's subject; None while it has no visible message."""
    queue = store.queue(state.subject)
    return None if queue is None else GroupQueue(store, state, queue)


def read_messages(store: Store, state: GroupState, entries: Sequence[Entry]) -> list[bytes]:
    """The records of these entries of a `GroupQueue`, copies unpacked; raises `CorruptionError`."""
    subject = state.subject
    if not state.aside.copies:
        return store.read_records(entries, subject=subject)
    own = [entry for entry in entries if not isinstance(entry, _CopyEntry)]
    copied = [entry for entry in entries if isinstance(entry, _CopyEntry)]
    records = iter(store.read_records(own, subject=subject))
    copies = iter(store.read_records(copied, subject=COPIES))
    return [
        _original(next(copies), subject) if isinstance(entry, _CopyEntry) else next(records)
        for entry in entries
    ]


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


def _original(record: bytes, subject: str) -> bytes:
    original = unpack_copy(record).record
    try:
        verify_record(subject, original)
    except ProtocolError as error:
        raise _damaged(str(error)) from error
    return original


def _damaged(reason: str) -> CorruptionError:
    return CorruptionError(segment=layout.COMMIT_LOG, offset=0, reason=f"no whole copy: {reason}")
