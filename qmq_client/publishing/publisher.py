"""Sends what committed: takes what the hooks handed over, publishes it, settles the rows.

`Publisher.step` is one bounded pass and reads no clock; `thread.py` calls it. Nothing here
is needed for a message to arrive: whatever is dropped, left or lost on the way is still a row that
falls due and that a watchdog sends. So every problem has the same answer: leave the row.

- Rows whose commit is not proven are sent only when another connection sees them (`reclaim`).
- Rows that come near their takeover are claimed anew before the send.
- Accepted rows are deleted in batches. Until then they are owned; if the process dies before the
  delete, the watchdog sends them again and the broker knows them. Those with an ordering key are
  deleted at once, because others wait for that.
- A row with an ordering key that is not its key's next waits a little (`ordering.py`): usually
  another process is about to send the one before it. After that it is left, too.
- Rows with a dedupe id are sent only when they are ours: an earlier run of the same business
  transaction may have stored them.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import random
from typing import Final

import sqlalchemy as sa

from qmq_client.options import ProducerOptions
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.row import BatchOutcome, OutboxRow
from qmq_client.outbox.transaction.handoff import HandoffQueue, HandOver
from qmq_client.publishing.callbacks import call_back
from qmq_client.publishing.deletes import Deletes
from qmq_client.publishing.forbidden import ForbiddenSubjects
from qmq_client.publishing.ordering import HeldRow, Turns, turns_of
from qmq_client.publishing.publish import publish_rows
from qmq_client.publishing.receipts import Fate, Receipts
from qmq_client.publishing.stats import Pass, PublisherStats
from qmq_client.retry import Breaker
from qmq_client.transport.port import Transport
from qmq_client.wire.message_id import format_message_id, is_dedupe_id

_log = logging.getLogger("qmq.publisher")

#: When to look for rows of an unproven commit: it may be under way still.
_PROBE_DELAYS_S: Final = (0.0, 0.02, 0.2, 1.0)
#: When to look again whether it is the turn of a row with an ordering key.
_TURN_DELAYS_S: Final = (0.02, 0.2, 1.0)
#: Part of the takeover time after which a row is claimed anew: what is left is for the request.
_FRESH_SHARE: Final = 0.5


@dataclass(slots=True, eq=False)
class _Ready:
    row: OutboxRow
    #: Since when the row is known to be ours.
    owned_since_s: float
    #: How often it was not its turn.
    holds: int = 0
    #: When to look again whether it is.
    due_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Probe:
    handed: HandOver
    due_s: float
    tries: int = 0


class Publisher:
    """Publishes for one producer. `queue`, `receipts` and `stats` are for any thread, the rest for one."""

    def __init__(
        self,
        *,
        store: OutboxStore,
        transport: Transport,
        token: bytes,
        options: ProducerOptions,
    ) -> None:
        self._store = store
        self._transport = transport
        self.token = token
        self._options = options
        self.receipts = Receipts()
        self.queue = HandoffQueue(options.queue_messages, self._on_dropped)
        self._held: list[_Ready] = []
        self._ready: deque[_Ready] = deque()
        self._probes: list[_Probe] = []
        self._deletes = Deletes(options.delete_delay_ms)
        self._breaker = Breaker(
            failures_max=options.breaker_failures,
            first_ms=options.breaker_first_ms,
            wait_ms_max=options.breaker_max_ms,
        )
        keep_s = options.keep_sent_s
        self._keep_ms = None if keep_s is None else keep_s * 1000
        self._outage_kind = ""
        self._forbidden = ForbiddenSubjects()
        self._sent_at_s = float("-inf")
        self._counts: Counter[str] = Counter()

    @property
    def stats(self) -> PublisherStats:
        """Counts until now."""
        queue = self.queue
        return PublisherStats(
            **self._counts,
            handed_over=queue.handed_over,
            dropped=queue.dropped,
            undeleted=self._store.undeleted,
            queued=len(queue) + len(self._ready) + len(self._held),
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to send, to look for or to delete. For the stepping thread."""
        waiting = self._ready or self._held or self._probes or self._deletes.message_ids
        return not (len(self.queue) or waiting)

    def step(self, now_s: float, *, is_hurried: bool = False) -> Pass:
        """One bounded pass: at most one batch sent. Raises only what a callback ends the process with.

        `is_hurried`: gather nothing, neither messages nor deletes.
        """
        before = self._counts.copy()
        self._receive(now_s)
        self._look_for_unproven(now_s)
        outcome = self._send(now_s, is_hurried)
        self._delete(now_s, is_hurried)
        done = self._counts
        wait_s, wake_at = self._next_due(now_s, is_hurried)
        call_back(self._options, outcome)
        return Pass(
            sent=done["sent"] - before["sent"],
            failed=done["failed"] - before["failed"],
            parked=done["parked"] - before["parked"],
            left=done["left"] - before["left"],
            deleted=done["deleted"] - before["deleted"],
            wait_s=wait_s,
            wake_at_messages=wake_at,
        )

    def leave_all(self) -> int:
        """Let go of what is not sent yet, and of all that comes; the rows fall due by themselves."""
        self.queue.close()
        before = self._counts["left"]
        self._leave([each.row for each in (*self._ready, *self._held)])
        self._ready.clear()
        self._held.clear()
        handed = [probe.handed for probe in self._probes]
        self._probes.clear()
        while handed := handed + self.queue.take(self._options.batch_messages):
            self._leave([row for each in handed for row in each.rows])
            handed = []
        return self._counts["left"] - before

    def _receive(self, now_s: float) -> None:
        due = [each for each in self._held if each.due_s <= now_s]
        if due:
            self._held = [each for each in self._held if each.due_s > now_s]
            self._ready.extendleft(reversed(due))
        for handed in self.queue.take(self._options.batch_messages - len(self._ready)):
            if handed.token != self.token:
                self._leave(handed.rows)  # stored before a fork: the parent's
            elif handed.is_certain:
                self._ready += [_Ready(row, handed.written_at_s) for row in handed.rows]
            else:
                self._probes.append(_Probe(handed, now_s))

    def _look_for_unproven(self, now_s: float) -> None:
        for probe in [probe for probe in self._probes if probe.due_s <= now_s]:
            rows = probe.handed.rows
            visible = self._reclaim([row.message_id for row in rows])
            probe.tries += 1
            if not visible and probe.tries < len(_PROBE_DELAYS_S):
                probe.due_s = now_s + _PROBE_DELAYS_S[probe.tries]
                continue
            self._probes.remove(probe)
            if visible is None:
                self._leave(rows)
                continue
            # A transaction is visible wholly or not at all: what is missing was undone.
            self._ready += [_Ready(row, now_s) for row in rows if row.message_id in visible]
            gone = [row.message_id for row in rows if row.message_id not in visible]
            self._count(gone=len(gone))
            self.receipts.tell(gone, Fate.LEFT)

    def _send(self, now_s: float, is_hurried: bool) -> BatchOutcome:
        if not self._ready or self._linger_s(now_s, is_hurried) > 0:
            return BatchOutcome()
        if not self._breaker.allows(now_s):
            self._leave([each.row for each in self._ready])
            self._ready.clear()
            return BatchOutcome()
        batch = self._take_batch()
        try:
            owned = self._still_owned(batch, now_s)
            return self._publish(self._in_turn(owned, now_s), now_s)
        except BaseException:
            # The next ones must not wait for what is wrong with these.
            self._leave([each.row for each in batch if each not in self._held])
            raise
        finally:
            for _ in batch:
                self._ready.popleft()

    def _publish(self, rows: list[OutboxRow], now_s: float) -> BatchOutcome:
        if not rows:
            return BatchOutcome()
        outcome = publish_rows(
            rows,
            transport=self._transport,
            backoff=self._options.backoff,
            max_attempts=self._options.max_attempts,
            random=random,
            limits=self._options.limits,
            forbidden=self._forbidden,
        )
        self._settle(outcome, now_s)
        if any(row.ordering_key is not None for row in rows):
            self._deletes.hurry(now_s)  # others wait for these to be gone
        return outcome

    def _take_batch(self) -> list[_Ready]:
        """The next batch; it stays in `_ready` until its outcome is recorded."""
        batch: list[_Ready] = []
        batch_bytes = 0
        for each in self._ready:
            batch_bytes += len(each.row.record)
            is_full = len(batch) == self._options.batch_messages
            if batch and (is_full or batch_bytes > self._options.batch_bytes):
                break
            batch.append(each)
        return batch

    def _still_owned(self, batch: list[_Ready], now_s: float) -> list[_Ready]:
        fresh_s = self._options.takeover_ms / 1000 * _FRESH_SHARE
        doubtful = {
            each.row.message_id
            for each in batch
            if now_s - each.owned_since_s > fresh_s or is_dedupe_id(each.row.message_id)
        }
        if not doubtful:
            return batch
        gone = doubtful - (self._reclaim(list(doubtful)) or set())
        self._leave([each.row for each in batch if each.row.message_id in gone])
        return [each for each in batch if each.row.message_id not in gone]

    def _in_turn(self, batch: list[_Ready], now_s: float) -> list[OutboxRow]:
        """The rows that pass no earlier one of their ordering key; the others wait a little."""
        rows = [each.row for each in batch]
        if all(row.ordering_key is None for row in rows):
            return rows
        try:
            turns = turns_of(rows, self._store, accepted=frozenset(self._deletes.message_ids))
        except sa.exc.SQLAlchemyError as error:
            self._on_database_error("look for turns", error)
            free = [row for row in rows if row.ordering_key is None]
        else:
            free = turns.free
        free_ids = {row.message_id for row in free}
        self._hold([each for each in batch if each.row.message_id not in free_ids], now_s)
        return free

    def _hold(self, batch: list[_Ready], now_s: float) -> None:
        self._count(held=len(batch))
        given_up: list[OutboxRow] = []
        for each in batch:
            if each.holds == len(_TURN_DELAYS_S) or len(self._held) >= self._options.queue_messages:
                given_up.append(each.row)
                continue
            each.due_s = now_s + _TURN_DELAYS_S[each.holds]
            each.holds += 1
            self._held.append(each)
        if given_up:
            self._give_back(given_up)

    def _give_back(self, rows: list[OutboxRow]) -> None:
        """Let go of rows whose turn does not come: who sends the one before them takes them too."""
        self._leave(rows)
        turns = Turns(held=[HeldRow(row, 0) for row in rows])
        try:
            self._store.settle(turns.given_back(), token=self.token)
        except sa.exc.SQLAlchemyError as error:
            self._on_database_error("give back", error)

    def _reclaim(self, message_ids: list[bytes]) -> set[bytes] | None:
        """Which of these are stored and ours; None when the database does not say."""
        try:
            owned = self._store.reclaim(
                message_ids, token=self.token, lease_ms=self._options.takeover_ms
            )
        except sa.exc.SQLAlchemyError as error:
            self._on_database_error("reclaim", error)
            return None
        self._count(reclaimed=len(owned))
        return owned

    def _settle(self, outcome: BatchOutcome, now_s: float) -> None:
        self._sent_at_s = now_s
        self._count(
            sent=len(outcome.sent),
            failed=len(outcome.failed),
            parked=len(outcome.parked),
            requests=outcome.requests,
        )
        if outcome.unreachable:
            self._breaker.on_failure(now_s, at_least_s=outcome.retry_after_s)
            self._tell_outage(outcome.failed[-1].error)
        elif outcome.requests:
            if failures := self._breaker.failures:
                _log.info("broker takes messages again, failures=%d", failures)
            self._breaker.on_success()
        if outcome.sent:
            self._deletes.add(outcome.sent, now_s)
        self.receipts.tell(outcome.sent, Fate.ACCEPTED)
        for row in outcome.parked:
            _log.error("message %s parked: %s", format_message_id(row.message_id), row.error)
            self.receipts.tell([row.message_id], Fate.PARKED, row.error)
        for failed in outcome.failed:
            self.receipts.tell([failed.message_id], Fate.LEFT, failed.error)
        if outcome.failed or outcome.parked:
            try:
                self._store.settle(replace(outcome, sent=()), token=self.token)
            except sa.exc.SQLAlchemyError as error:
                self._on_database_error("settle", error)  # the rows fall due as they are

    def _delete(self, now_s: float, is_hurried: bool) -> None:
        if not self._deletes.is_due(now_s, is_hurried=is_hurried and not self._ready):
            return
        waiting = self._deletes.message_ids
        try:
            deleted = self._store.delete_sent(waiting, token=self.token, keep_ms=self._keep_ms)
        except sa.exc.SQLAlchemyError as error:
            self._on_database_error("delete", error)
            self._deletes.on_failure(now_s)
            return
        self._count(deleted=deleted, delete_calls=1)
        self._deletes.on_deleted()

    def _linger_s(self, now_s: float, is_hurried: bool) -> float:
        """How long to go on gathering: nothing when idle, up to the linger after a request."""
        if is_hurried or len(self._ready) >= self._options.batch_messages:
            return 0.0
        return self._sent_at_s + self._options.linger_ms / 1000 - now_s

    def _next_due(self, now_s: float, is_hurried: bool) -> tuple[float | None, int]:
        waits = [probe.due_s - now_s for probe in self._probes]
        waits += [each.due_s - now_s for each in self._held]
        if (delete_s := self._deletes.wait_s(now_s)) is not None:
            waits.append(delete_s)
        wake_at = 1
        if self._ready:
            waits.append(self._linger_s(now_s, is_hurried))
        elif len(self.queue):
            waits.append(0.0)
        linger_s = self._linger_s(now_s, is_hurried)
        if linger_s > 0:
            # Messages that come now would only wait: sleep until the linger is over or a batch full.
            waits.append(linger_s)
            wake_at = self._options.batch_messages
        return (max(0.0, min(waits)) if waits else None), wake_at

    def _tell_outage(self, error: str) -> None:
        """When it begins, when its kind changes, and each time its failures have doubled."""
        failures, kind = self._breaker.failures, error.partition(":")[0]
        if kind != self._outage_kind or failures & (failures - 1) == 0:
            _log.warning(
                "broker takes nothing, the watchdog sends the rows, failures=%d: %s",
                failures,
                error,
            )
        self._outage_kind = kind

    def _leave(self, rows: Sequence[OutboxRow]) -> None:
        self._count(left=len(rows))
        self.receipts.tell([row.message_id for row in rows], Fate.LEFT)

    def _on_dropped(self, handed: HandOver) -> None:
        self.receipts.tell([row.message_id for row in handed.rows], Fate.LEFT)

    def _on_database_error(self, what: str, error: Exception) -> None:
        self._count(database_errors=1)
        _log.warning("outbox %s failed, rows fall due by themselves: %s", what, error)

    def _count(self, **more: int) -> None:
        self._counts.update(more)
