"""Where in its subject a start position is: the sequence at which a group begins or continues."""

from __future__ import annotations

from qmq_broker.storage.store import Store
from qmq_client.wire.start import Start, StartKind


def position_of(store: Store, subject: str, start: Start) -> int:
    """The sequence of this start position, within what is durable and stays.

    What retention is about to delete counts as gone: nobody asks again whether a group wants it.
    Places are found by halving, which may block for a few reads.
    """
    queue = store.queue(subject)
    if queue is None:
        return 0
    if start.kind is StartKind.LATEST:
        return queue.next_sequence
    first = queue.sequence_at(store.retention.spared_offset)
    match start.kind:
        case StartKind.SEQUENCE:
            wanted = start.number
        case StartKind.TIME:
            wanted = queue.sequence_at(store.offset_at(start.number))
        case _:
            wanted = first
    return min(max(wanted, first), queue.next_sequence)
