"""The sending order of rows with an ordering key: which are ready, and which are held.

Rows of one subject and ordering key are accepted in the order in which their transactions committed
(O4). The outbox has that order: such a row is written under a lock of its key that is held until
the COMMIT, so a lower row id of a key is an earlier commit. A row may be sent if every unsent row
before it is in the same batch, in order. Live and parked rows count as unsent. So a message that
cannot be sent stops later ones of its key until it is sent, retried or purged, but no other key.
When a row is accepted, the rows that waited after it are due at once (`accepted_pairs`): if each
waited for its due time, a key with steady traffic would never catch up.

Shared by the publisher and the watchdog; does not read a clock. Before each batch with such rows the
publisher makes one query, and sends at once if no other process's rows are in the way.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from qmq_client.outbox.row import BatchOutcome, FailedRow, OutboxRow
from qmq_client.publishing.publish import WAITS_FOR_EARLIER, ordering_pair
from qmq_client.wire.shown import shorten

#: A held row is tried again after this time, and this much later for each row before it, so that a
#: long tail after a parked row costs few claims, and becomes due in sending order.
HELD_MS: Final = 250
HELD_MS_PER_PLACE: Final = 20
HELD_MS_MAX: Final = 600_000

_log = logging.getLogger("qmq.publish")
Pair = tuple[str, str]


class WaitingRows(Protocol):
    """The query of the outbox; see `OutboxStore`."""

    def waiting_before(self, pairs: Sequence[Pair]) -> dict[Pair, list[bytes]]:
        """Message ids of live and parked rows of these subjects and keys, by row id; bounded."""
        ...


@dataclass(frozen=True, slots=True)
class HeldRow:
    """A row that must wait."""

    row: OutboxRow
    #: Number of known unsent rows before it.
    place: int


@dataclass(slots=True)
class OrderedBatch:
    """A batch, divided into ready and held rows."""

    #: Rows to be sent now, in this order.
    ready: list[OutboxRow] = field(default_factory=list)
    held: list[HeldRow] = field(default_factory=list)
    #: Keys with further unsent rows besides the ready ones.
    followed: set[Pair] = field(default_factory=set)

    def returned(self) -> BatchOutcome:
        """The outcome of the held rows: no attempt, and due again soon."""
        return BatchOutcome(
            failed=tuple(
                FailedRow(
                    message_id=each.row.message_id,
                    delay_ms=min(HELD_MS + each.place * HELD_MS_PER_PLACE, HELD_MS_MAX),
                    error=WAITS_FOR_EARLIER,
                    is_attempt=False,
                )
                for each in self.held
            )
        )


def order_batch(
    rows: Sequence[OutboxRow], store: WaitingRows, *, accepted: Collection[bytes] = ()
) -> OrderedBatch:
    """Divide `rows` into ready and held ones.

    `accepted`: ids whose rows still exist although the broker has them. Queries the store only if a
    row has an ordering key. A row that is no longer in the store is held: another process has sent
    it, or a person removed it.
    """
    pairs = {pair for row in rows if (pair := ordering_pair(row)) is not None}
    if not pairs:
        return OrderedBatch(ready=list(rows))
    waiting = {
        pair: [id_ for id_ in ids if id_ not in accepted]
        for pair, ids in store.waiting_before(sorted(pairs)).items()
    }
    return order_rows(rows, waiting)


def accepted_pairs(rows: Sequence[OutboxRow], sent: Collection[bytes]) -> set[Pair]:
    """Subjects and keys of the accepted rows: rows that wait after these are due at once."""
    pairs = ((ordering_pair(row), row.message_id) for row in rows if row.ordering_key is not None)
    accepted = frozenset(sent)
    return {pair for pair, message_id in pairs if pair is not None and message_id in accepted}


class WaitsForWatchdog:
    """Logs ordered rows that one sender returned; for one thread at a time.

    At the 1st, 2nd, 4th, 8th … row: without a watchdog no message of such a key is sent.
    """

    def __init__(self) -> None:
        self._rows = 0

    def returned(self, rows: Sequence[OutboxRow]) -> None:
        """Count rows that wait for an earlier row of their key that another process has."""
        before, self._rows = self._rows, self._rows + len(rows)
        if before.bit_length() == self._rows.bit_length():
            return
        keys = sorted({f"{row.subject} {row.ordering_key}" for row in rows})
        _log.warning(
            "messages=%d wait for an earlier one of their ordering key, which another process has: %s. "
            "A watchdog sends them all if that process does not",
            self._rows,
            shorten(", ".join(keys)),
        )


def order_rows(rows: Sequence[OutboxRow], waiting: dict[Pair, list[bytes]]) -> OrderedBatch:
    """The same, given the unsent ids of each subject and key."""
    here = {row.message_id: row for row in rows if row.ordering_key is not None}
    # Rows of a key take the places of that key's rows in the batch, in their own order.
    next_ready = {pair: iter(_unbroken(ids, here)) for pair, ids in waiting.items()}
    places = {pair: {id_: place for place, id_ in enumerate(ids)} for pair, ids in waiting.items()}
    ready_ids: set[bytes] = set()
    ordered = OrderedBatch()
    for row in rows:
        pair = ordering_pair(row)
        if pair is None:
            ordered.ready.append(row)
        elif (ready_id := next(next_ready.get(pair, iter(())), None)) is not None:
            ordered.ready.append(here[ready_id])
            ready_ids.add(ready_id)
    for row in rows:
        pair = ordering_pair(row)
        if pair is not None and row.message_id not in ready_ids:
            known = places.get(pair, {})
            ordered.held.append(HeldRow(row, known.get(row.message_id, len(known))))
    ordered.followed = {pair for pair, ids in waiting.items() if not ready_ids.issuperset(ids)}
    return ordered


def _unbroken(ids: Sequence[bytes], here: Collection[bytes]) -> list[bytes]:
    """The first of `ids`, up to the first one that is missing here."""
    count = next((index for index, id_ in enumerate(ids) if id_ not in here), len(ids))
    return list(ids[:count])
