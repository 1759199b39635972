"""Everything that was ever visible in the broker's queues, kept by the world over all its lives.

What the retention has given up must have been the same as long as it was there, and whoever was promised
it must have got it: at the end the verdict needs all of it. Offsets and places never change (B8).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from qmq_broker.storage.store import Store
from qmq_client.wire.names import OWN_PREFIX
from qmq_client.wire.record import Record, decode_record


@dataclass(frozen=True, slots=True)
class Kept:
    """One message of a subject, as it stood there."""

    offset: int
    record: Record


@dataclass(slots=True)
class Shelf:
    """Looks at what is durable; subjects of the broker's own are left out."""

    #: By subject, in order of their sequences.
    kept: dict[str, list[Kept]] = field(default_factory=dict)
    #: What was found wrong, in sentences.
    faults: list[str] = field(default_factory=list)

    def look(self, store: Store) -> None:
        """Keep what is new. To be called before anything that was not looked at is given up."""
        for subject in store.subjects():
            if subject.startswith(OWN_PREFIX):
                continue
            kept = self.kept.setdefault(subject, [])
            kept += self._read(store, subject, len(kept))

    def compare(self, store: Store) -> None:
        """Look, and hold what is still there to what it was."""
        self.look(store)
        for subject, kept in self.kept.items():
            queue = store.queue(subject)
            first = 0 if queue is None else queue.first_sequence
            if queue is None or queue.next_sequence != len(kept):
                end = 0 if queue is None else queue.next_sequence
                self.faults.append(f"B8: {subject} ends at {end}, and had {len(kept)} messages")
            elif self._read(store, subject, first) != kept[first:]:
                self.faults.append(f"B8: {subject} has other messages than it had")

    def _read(self, store: Store, subject: str, first: int) -> list[Kept]:
        queue = store.queue(subject)
        if queue is None or queue.next_sequence <= first:
            return []
        if queue.first_sequence > first:
            self.faults.append(f"retention: {subject} {first} was given up before it was seen")
            return []
        entries = queue.entries(first, queue.next_sequence - first)
        entries = [one for one in entries if one.physical_offset < store.durable_offset]
        records = store.read_records(entries, subject=subject)
        return [
            Kept(entry.physical_offset, decode_record(subject, data))
            for entry, data in zip(entries, records, strict=True)
        ]
