"""Finding a message of which only copies are left: groups set it aside, retention took the
original.

A copy has an id of its own, so the copies themselves are read: those that wait among the delayed
messages, and those that came back to a group that is not done with them. Reading the disk happens
beside the loop; the groups are asked before and after, in the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from qmq_broker.errors import CorruptionError
from qmq_broker.service.delivery.delivery import Delivery
from qmq_broker.storage.index.key_search import FoundRecord
from qmq_broker.storage.logs.copies import Copy, unpack_copy
from qmq_broker.storage.schedule.columns import Columns
from qmq_broker.storage.schedule.fates import Fate
from qmq_broker.storage.store import Store
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.names import COPIES
from qmq_client.wire.record import decode_record, record_message_id

#: Bytes of copies that one search reads: about a second.
READ_BYTES_MAX: Final = 256 * 1024 * 1024


class Kept(NamedTuple):
    """What groups hold as copies at this moment."""

    #: Sequences, in the queue of copies, of those that came back.
    back: tuple[int, ...]
    #: Whether any are still away.
    is_any_away: bool


class FoundCopy(NamedTuple):
    """A copy of the message that is searched."""

    copy: Copy
    found: FoundRecord
    #: Sequence in the queue of copies; None for one that is away.
    back: int | None


class CopySearch:
    """Searches over the copies of one broker; each method says its thread."""

    def __init__(self, store: Store, delivery: Delivery) -> None:
        self._store = store
        self._delivery = delivery

    def kept(self) -> Kept | None:
        """What there is to look through; None for nothing. In the loop."""
        asides = [state.aside for state in self._delivery.groups()]
        back = tuple(sorted({copy for aside in asides for copy in aside.copies.values()}))
        is_any_away = any(aside.count for aside in asides)
        return Kept(back, is_any_away) if back or is_any_away else None

    def by_id(self, message_id: bytes, kept: Kept) -> tuple[list[FoundCopy], bool]:
        """Copies of this message, and whether all were looked at. In any thread.

        Damaged lists of delayed messages are passed over. Each copy comes with its place and the
        time the message was made.
        """
        found: list[FoundCopy] = []
        damage: list[CorruptionError] = []
        room_bytes = READ_BYTES_MAX
        for back, place, record in self._records(kept, damage.append):
            room_bytes -= len(record)
            if room_bytes < 0:
                return found, False
            try:
                copy = unpack_copy(record)
                if record_message_id(copy.record) != message_id:
                    continue
                born_at_ms = decode_record(copy.subject, copy.record).born_at_ms
            except (CorruptionError, ProtocolError):  # its group gets the message without it
                continue
            one = FoundRecord(copy.subject, copy.sequence, place, born_at_ms, copy.record)
            found.append(FoundCopy(copy, one, back))
        return found, not damage

    def still_kept(self, found: list[FoundCopy]) -> list[FoundRecord]:
        """Each message once, if its group still has the copy. In the loop."""
        messages: dict[tuple[str, int], FoundRecord] = {}
        for copy, record, back in found:
            state = self._delivery.group(copy.subject, copy.group)
            if state is None:
                continue
            aside = state.aside
            is_back = back is not None and aside.copies.get(copy.sequence) == back
            if is_back or aside.is_away(copy.sequence, copy.ticket):
                messages[copy.subject, copy.sequence] = record
        return list(messages.values())

    def _records(
        self, kept: Kept, on_damage: Callable[[CorruptionError], None]
    ) -> Iterator[tuple[int | None, int, bytes]]:
        """Sequence in the queue of copies if it came back, place, and record of each copy."""
        queue = self._store.queue(COPIES)
        for back in kept.back:
            entries = [] if queue is None else queue.entries(back, 1)
            try:
                for record in self._store.read_records(entries, subject=COPIES):
                    yield back, entries[0].physical_offset, record
            except CorruptionError:
                continue
        schedule = self._store.schedule
        for bucket, next_sequence, pending in schedule.states() if kept.is_any_away else ():
            if not pending:
                continue
            for columns in schedule.columns(bucket, 0, next_sequence, on_damage=on_damage):
                yield from self._waiting(columns, on_damage)

    def _waiting(
        self, columns: Columns, on_damage: Callable[[CorruptionError], None]
    ) -> Iterator[tuple[None, int, bytes]]:
        schedule = self._store.schedule
        try:
            fates, number = schedule.fates_of(columns.bucket), schedule.subjects.number(COPIES)
        except CorruptionError as error:
            on_damage(error)
            return
        if fates is None:
            return
        indexes = [
            index
            for index, sequence in enumerate(columns.sequences)
            if columns.subjects[index] == number and fates.get(sequence) is Fate.PENDING
        ]
        for index in indexes:
            record = schedule.records.read_all(columns.bucket, COPIES, columns, [index])[index]
            if isinstance(record, bytes):
                yield None, columns.sources[index], record
