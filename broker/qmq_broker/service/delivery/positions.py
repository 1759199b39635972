"""Where in its subject a start position is: the sequence at which a group begins or continues."""

from __future__ import annotations

from qmq_broker.storage.store import Store
from qmq_client.wire.start import Start, StartKind


def position_of(store: Store, subject: str, start: Start) -> int:
    """The sequence of this start position, within what exists and is durable.

    A time is found in the commit log by halving, which may block for a few reads.
    """
    queue = store.queue(subject)
    if queue is None:
        return 0
    match start.kind:
        case StartKind.EARLIEST:
            wanted = queue.first_sequence
        case StartKind.LATEST:
            wanted = queue.next_sequence
        case StartKind.SEQUENCE:
            wanted = start.number
        case StartKind.TIME:
            wanted = queue.sequence_at(store.offset_at(start.number))
    return min(max(wanted, queue.first_sequence), queue.next_sequence)
