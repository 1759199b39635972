"""Sends committed messages: takes hints, finds their committed rows, publishes and settles them.

`Publisher.step` is one bounded pass and does not read a clock; `thread.py` calls it. The publisher
may always give up on a row: it stays in the outbox, falls due, and a watchdog sends it. So it
handles every problem by leaving the row.

- A hint proves nothing. Each batch is looked for by one SELECT on a separate connection, and only
  rows that exist, belong to this process and are not yet due are sent. Missing rows are checked
  again after 5, 50 and 500 ms.
- Rows close to their takeover time are claimed again before the send.
- Accepted rows are deleted in batches. Until then they are owned; if the process dies before the
  delete, the watchdog sends them again and the broker recognizes the repeats. Those with an
  ordering key are
  deleted at once, because others wait for that.
- A row with an ordering key that is not its key's next waits a short time (`ordering.py`): usually
  another process is about to send the previous one. After that it is left, too.
- For a row with a dedupe id the record is read too: an earlier run of the same business transaction
  may have stored another one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import random
from typing import Final, TypeVar

from qmq_client.options import ProducerOptions
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.row import BatchOutcome, FoundRow, OutboxRow
from qmq_client.outbox.sending.notes import Hint
from qmq_client.outbox.table import LIVE, PARKED, SENT
from qmq_client.publishing.callbacks import call_back
from qmq_client.publishing.forbidden import ForbiddenSubjects
from qmq_client.publishing.hint_queue import HintQueue
from qmq_client.publishing.ordering import (
    HeldRow,
    OrderedBatch,
    Pair,
    WaitsForWatchdog,
    accepted_pairs,
    order_batch,
)
from qmq_client.publishing.publish import ordering_pair, publish_rows
from qmq_client.publishing.receipts import Receipts, SendOutcome
from qmq_client.publishing.stats import Pass, PublisherStats
from qmq_client.retry import Breaker
from qmq_client.transport.port import Transport
from qmq_client.wire.message_id import format_message_id

#: Ids that may wait while the database is locked; the rest fall due and become duplicates.
_IDS_MAX: Final = 100_000
#: This many are deleted at once instead of gathering more.
_IDS_AT_ONCE: Final = 500
_FIRST_PAUSE_S: Final = 0.1
#: The longest interval of failed deletes: no message waits for them, but its row falls due and is sent again.
_PAUSE_S_MAX: Final = 2.0


class Deletes:
    """The ids of accepted rows, and the time of their deletion. Owned by the thread that steps the publisher."""

    def __init__(self, delay_ms: int) -> None:
        self._delay_s = delay_ms / 1000
        #: Ids in the order of acceptance.
        self.message_ids: list[bytes] = []
        self._due_s = 0.0
        #: Earliest time of the next delete, even if hurried; and the last interval, 0 while the database answers.
        self._refused_until_s = float("-inf")
        self._pause_s = 0.0
        self._held_until_s = float("-inf")
        #: Whether the database refused the last delete, so that no flush waits for them.
        self.was_refused = False

    def add(self, message_ids: Sequence[bytes], now_s: float) -> None:
        """Add accepted rows."""
        if not self.message_ids:
            self._due_s = now_s + self._delay_s
        self.message_ids += message_ids
        del self.message_ids[:-_IDS_MAX]

    def hurry(self, now_s: float) -> None:
        """Delete as soon as possible, because other rows wait for it."""
        self._due_s = max(now_s, self._refused_until_s)

    def put_off(self, until_s: float) -> None:
        """Do not delete before this time, unless hurried."""
        self._due_s = max(self._due_s, until_s)
        self._held_until_s = until_s

    def is_due(self, now_s: float, *, is_hurried: bool) -> bool:
        """Whether to delete now; `is_hurried`: without gathering."""
        if not self.message_ids or now_s < self._refused_until_s:
            return False
        if is_hurried:
            return True
        is_full = len(self.message_ids) >= _IDS_AT_ONCE
        return now_s >= self._held_until_s and (is_full or now_s >= self._due_s)

    def wait_s(self, now_s: float) -> float | None:
        """The time until the next delete is due; None without ids."""
        return max(self._due_s, self._held_until_s) - now_s if self.message_ids else None

    def on_deleted(self) -> None:
        """Forget the ids: all rows are deleted."""
        self.message_ids = []
        self._pause_s = 0.0
        self.was_refused = False

    def on_failure(self, now_s: float) -> None:
        """Record that the database refused: wait longer than the last time."""
        self.was_refused = True
        self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _PAUSE_S_MAX)
        self._due_s = self._refused_until_s = now_s + self._pause_s


_log = logging.getLogger("qmq.publisher")
_Result = TypeVar("_Result")

#: Delays of further checks for a missing row, whose COMMIT may still be under way.
_LOOK_AGAIN_S: Final = (0.005, 0.05, 0.5)
#: Delay of the first check if the COMMIT is only about to be sent.
_EARLY_S: Final = 0.001
#: Delays of checks whether a held row is ready. If processes alternate at a key, each change waits for one check.
_HOLD_DELAYS_S: Final = (*(0.02,) * 5, *(0.05,) * 22)
#: Part of the takeover time after which a row is claimed again; the rest is for the request.
_FRESH_SHARE: Final = 0.5
#: How long deletes wait for a moment in which the application uses no connection to its SQLite file.
_POLITE_S: Final = 1.0
_POLITE_LOOK_S: Final = 0.02


@dataclass(slots=True, eq=False)
class _Wanted:
    """A row that may be committed."""

    row: OutboxRow
    #: Time since which this publisher owns the row, if it exists.
    owned_since_s: float
    #: Time of the next check.
    due_s: float
    #: How often it was missing.
    looks: int = 0
    #: How often it was held.
    holds: int = 0


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
        self.queue = HintQueue(options.queue_messages, self._on_dropped)
        #: Wanted rows by message id, in order of arrival.
        self._wanted: dict[bytes, _Wanted] = {}
        self._deletes = Deletes(options.delete_delay_ms)
        self._delete_politely_until_s: float | None = None
        self._breaker = Breaker(
            failures_max=options.breaker_failures,
            first_ms=options.breaker_first_ms,
            wait_ms_max=options.breaker_max_ms,
        )
        keep_s = options.keep_sent_s
        self._keep_ms = None if keep_s is None else keep_s * 1000
        self._outage_kind = ""
        self._forbidden = ForbiddenSubjects()
        #: Keys with unsent rows after those of the last batch.
        self._followed: set[Pair] = set()
        self._waits_for_watchdog = WaitsForWatchdog()
        self._sent_at_s = float("-inf")
        self._counts: Counter[str] = Counter()

    @property
    def stats(self) -> PublisherStats:
        """Counts until now."""
        queue = self.queue
        return PublisherStats(
            **self._counts,
            enqueued=queue.enqueued,
            dropped=queue.dropped,
            undeleted=self._store.undeleted,
            queued=len(queue) + len(self._wanted),
        )

    @property
    def is_idle(self) -> bool:
        """Whether no row is left to send, to check or to delete. For the stepping thread.

        Refused deletes do not count: they may wait for a transaction of the calling code, as with SQLite.
        """
        is_deleted = not self._deletes.message_ids or self._deletes.was_refused
        return is_deleted and not (len(self.queue) or self._wanted)

    def retry_deletes(self) -> bool:
        """Try refused deletes once more; returns whether there are any."""
        was_refused, self._deletes.was_refused = self._deletes.was_refused, False
        return was_refused

    def step(self, now_s: float, *, is_hurried: bool = False) -> Pass:
        """One bounded pass, which sends at most one batch. Raises only exits, such as `SystemExit` of a callback.

        `is_hurried`: do not wait to collect messages or deletes.
        """
        before = self._counts.copy()
        self._receive(now_s, is_hurried)
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
        """Give up all unsent and future rows; they fall due and the watchdog sends them."""
        self.queue.close()
        before = self._counts["left"]
        self._leave([each.row for each in self._wanted.values()])
        self._wanted.clear()
        self._deletes.on_deleted()  # a failure is harmless: the watchdog sends them again, and the broker knows them
        while hints := self.queue.take(self._options.batch_messages):
            self._leave([row for hint in hints for row in hint.rows])
        return self._counts["left"] - before

    def on_rolled_back(self, rows: Sequence[OutboxRow]) -> None:
        """Forget rows that were rolled back. For any thread."""
        self.receipts.resolve([row.message_id for row in rows], SendOutcome.ROLLED_BACK)

    def _receive(self, now_s: float, is_hurried: bool) -> None:
        accepted = set(self._deletes.message_ids)
        for hint in self.queue.take(self._options.batch_messages):
            if hint.token != self.token:
                self._leave(hint.rows)  # written before a fork: the parent's row
                continue
            due_s = now_s + _EARLY_S if hint.is_early and not is_hurried else now_s
            for row in hint.rows:
                if row.message_id not in accepted:
                    self._wanted[row.message_id] = _Wanted(row, hint.written_at_s, due_s)

    def _send(self, now_s: float, is_hurried: bool) -> BatchOutcome:
        batch = self._due(now_s)
        if not batch or self._linger_s(now_s, len(batch), is_hurried) > 0:
            return BatchOutcome()
        if not self._breaker.allows(now_s):
            self._forget(batch)
            self._leave_in_outage([each.row for each in batch])
            return BatchOutcome()
        try:
            rows = self._ready(self._there(batch, now_s), now_s)
            # Without waiting rows, which may become due when the broker accepts these.
            batch = [each for each in batch if each.due_s <= now_s]
            return self._publish(rows, now_s)
        except BaseException:
            # The next rows must not wait for a problem of these.
            batch = [each for each in batch if each.due_s <= now_s]
            self._leave([each.row for each in batch])
            raise
        finally:
            self._forget(batch)

    def _due(self, now_s: float) -> list[_Wanted]:
        """The next batch. A row stays wanted until its outcome is recorded, or it is scheduled again."""
        batch: list[_Wanted] = []
        batch_bytes = 0
        for each in self._wanted.values():
            if each.due_s > now_s:
                continue
            batch_bytes += len(each.row.record)
            is_full = len(batch) == self._options.batch_messages
            if batch and (is_full or batch_bytes > self._options.batch_bytes):
                break
            batch.append(each)
        return batch

    def _there(self, batch: list[_Wanted], now_s: float) -> list[_Wanted]:
        """The committed rows of the batch that this publisher owns; the others are checked again, or left."""
        fresh_s = self._options.takeover_ms / 1000 * _FRESH_SHARE
        old = [each.row.message_id for each in batch if now_s - each.owned_since_s > fresh_s]
        reclaimed: set[bytes] | None = set()
        if old:
            lease_ms = self._options.takeover_ms
            reclaimed = self._asked(
                "reclaim", lambda: self._store.reclaim(old, token=self.token, lease_ms=lease_ms)
            )
            self._count(reclaimed=len(reclaimed or ()))
        found = None if reclaimed is None else self._find(batch)
        ready: list[_Wanted] = []
        for each in batch:
            row = None if found is None else found.get(each.row.message_id)
            if row is None:
                self._look_again(each, now_s, is_known=found is not None)
            elif row.state != LIVE or row.token != self.token:
                self._resolve_by_state(each.row, row)
            elif row.is_due:  # by the database's clock, which may have jumped: to be claimed again
                each.owned_since_s = float("-inf")
                self._look_again(each, now_s, is_known=False)
            else:
                if row.record is not None:
                    each.row = _with_record(each.row, row.record)
                if each.row.message_id in (reclaimed or ()):
                    each.owned_since_s = now_s
                ready.append(each)
        return ready

    def _find(self, batch: list[_Wanted]) -> dict[bytes, FoundRow] | None:
        with_records = any(each.row.is_repeatable for each in batch)
        ids = [each.row.message_id for each in batch]
        found = self._asked("look", lambda: self._store.find(ids, with_records=with_records))
        return None if found is None else {row.message_id: row for row in found}

    def _look_again(self, each: _Wanted, now_s: float, *, is_known: bool) -> None:
        """Schedule another check: the row is missing, or the database did not answer."""
        if each.looks < len(_LOOK_AGAIN_S):
            each.due_s = now_s + _LOOK_AGAIN_S[each.looks]
            each.looks += 1
        elif is_known:
            self._count(gone=1)
            self.receipts.resolve([each.row.message_id], SendOutcome.ROLLED_BACK)
        else:
            self._leave([each.row])

    def _resolve_by_state(self, row: OutboxRow, found: FoundRow) -> None:
        """The row exists but this publisher does not own it; the row's state gives the message's outcome."""
        if found.state == SENT:
            self.receipts.resolve([row.message_id], SendOutcome.ACCEPTED)
        elif found.state == PARKED:
            self._count(parked=1)
            self.receipts.resolve([row.message_id], SendOutcome.PARKED, found.error)
        else:
            self._leave([row])

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
        if accepted := accepted_pairs(rows, outcome.sent):
            self._deletes.hurry(now_s)  # other rows wait until these are deleted
            self._follow(accepted, now_s)
        return outcome

    def _follow(self, accepted: set[Pair], now_s: float) -> None:
        """Make rows held after accepted ones due at once, also those returned before."""
        for each in self._wanted.values():
            if each.holds and ordering_pair(each.row) in accepted:
                each.due_s, each.holds = now_s, 0
        self._take_unowned(accepted & self._followed, now_s)

    def _take_unowned(self, pairs: set[Pair], now_s: float) -> None:
        """Claim rows of these keys that no process owns, such as those that were returned."""
        keys = sorted({key for _, key in pairs})
        if not keys:
            return
        limit, lease_ms = self._options.batch_messages, self._options.takeover_ms
        claimed = self._asked(
            "claim",
            lambda: self._store.claim(token=self.token, limit=limit, lease_ms=lease_ms, keys=keys),
        )
        for row in claimed or ():
            self._wanted[row.message_id] = _Wanted(row, now_s, now_s)

    def _ready(self, batch: list[_Wanted], now_s: float) -> list[OutboxRow]:
        """The rows that may be sent now according to the order of their keys; the others are held."""
        rows = [each.row for each in batch]
        if all(row.ordering_key is None for row in rows):
            return rows
        accepted = frozenset(self._deletes.message_ids)
        ordered = self._asked(
            "look for earlier rows", lambda: order_batch(rows, self._store, accepted=accepted)
        )
        ready = (
            [row for row in rows if row.ordering_key is None] if ordered is None else ordered.ready
        )
        self._followed = set() if ordered is None else ordered.followed
        ready_ids = {row.message_id for row in ready}
        self._hold([each for each in batch if each.row.message_id not in ready_ids], now_s)
        return ready

    def _hold(self, batch: list[_Wanted], now_s: float) -> None:
        self._count(held=len(batch))
        given_up: list[OutboxRow] = []
        new = {pair for each in batch if not each.holds and (pair := ordering_pair(each.row))}
        self._take_unowned(new, now_s)  # the rows before them, if no process owns those
        for each in batch:
            if each.holds == len(_HOLD_DELAYS_S):
                given_up.append(each.row)
                continue
            each.due_s = now_s + _HOLD_DELAYS_S[each.holds]
            each.holds += 1
        if given_up:
            self._return(given_up)

    def _return(self, rows: list[OutboxRow]) -> None:
        """Release rows that were held too long: the process that sends the previous row claims them too."""
        self._leave(rows)
        self._waits_for_watchdog.returned(rows)
        self._disown(rows)

    def _leave_in_outage(self, rows: list[OutboxRow]) -> None:
        """Leave these rows, but return later ones of their ordering keys, which must not wait until these fall due."""
        self._leave(rows)
        if ordered := [row for row in rows if row.ordering_key is not None]:
            self._disown(ordered)

    def _disown(self, rows: list[OutboxRow]) -> None:
        ordered = OrderedBatch(held=[HeldRow(row, 0) for row in rows])
        self._asked("return", lambda: self._store.settle(ordered.returned(), token=self.token))

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
            self._log_outage(outcome.failed[-1].error)
        elif outcome.requests:
            if failures := self._breaker.failures:
                _log.info("broker accepts messages again, failures=%d", failures)
            self._breaker.on_success()
        if outcome.sent:
            self._deletes.add(outcome.sent, now_s)
        self.receipts.resolve(outcome.sent, SendOutcome.ACCEPTED)
        for row in outcome.parked:
            _log.error("message %s parked: %s", format_message_id(row.message_id), row.error)
            self.receipts.resolve([row.message_id], SendOutcome.PARKED, row.error)
        for failed in outcome.failed:
            self.receipts.resolve([failed.message_id], SendOutcome.LEFT, failed.error)
        if outcome.failed or outcome.parked:  # without an answer the rows fall due unchanged
            rest = replace(outcome, sent=())
            self._asked("settle", lambda: self._store.settle(rest, token=self.token))

    def _delete(self, now_s: float, is_hurried: bool) -> None:
        waiting = self._deletes.message_ids
        if not self._deletes.is_due(now_s, is_hurried=is_hurried and not self._wanted):
            return
        with self._store.quiet_moment() as is_quiet:
            if not is_quiet and not is_hurried and self._is_better_later(now_s):
                return
            deleted = self._asked(
                "delete",
                lambda: self._store.delete_sent(waiting, token=self.token, keep_ms=self._keep_ms),
            )
        self._delete_politely_until_s = None
        if deleted is None:
            self._deletes.on_failure(now_s)
            return
        self._count(deleted=deleted, delete_calls=1)
        if deleted < len(waiting):
            self._count(not_deleted=len(waiting) - deleted)
            _log.warning(
                "%d of %d accepted rows no longer existed at their deletion: another process sent or removed them",
                len(waiting) - deleted,
                len(waiting),
            )
        self._deletes.on_deleted()

    def _is_better_later(self, now_s: float) -> bool:
        """Whether to wait for the application, which is using its SQLite file."""
        if self._delete_politely_until_s is None:
            self._delete_politely_until_s = now_s + _POLITE_S
        if now_s >= self._delete_politely_until_s:
            return False
        self._deletes.put_off(now_s + _POLITE_LOOK_S)
        return True

    def _linger_s(self, now_s: float, messages: int, is_hurried: bool) -> float:
        """How long to continue collecting messages: 0 when idle, up to `linger_ms` after a request."""
        if is_hurried or messages >= self._options.batch_messages:
            return 0.0
        return self._sent_at_s + self._options.linger_ms / 1000 - now_s

    def _next_due(self, now_s: float, is_hurried: bool) -> tuple[float | None, int]:
        waits: list[float] = []
        due_s = [each.due_s for each in self._wanted.values()]
        linger_s = self._linger_s(now_s, sum(each <= now_s for each in due_s), is_hurried)
        if due_s:
            first_s = min(due_s)
            waits.append(max(first_s - now_s, linger_s if first_s <= now_s else 0.0))
        if (delete_s := self._deletes.wait_s(now_s)) is not None:
            waits.append(delete_s)
        if len(self.queue):
            waits.append(max(0.0, linger_s))
        wake_at = 1
        if linger_s > 0:
            # New messages would only wait: sleep until the linger time is over or a batch is full.
            waits.append(linger_s)
            wake_at = self._options.batch_messages
        return (max(0.0, min(waits)) if waits else None), wake_at

    def _log_outage(self, error: str) -> None:
        """Log an outage when it begins, when its kind changes, and each time its failures have doubled."""
        failures, kind = self._breaker.failures, error.partition(":")[0]
        if kind != self._outage_kind or failures & (failures - 1) == 0:
            _log.warning(
                "broker accepts nothing, the watchdog sends the rows, failures=%d: %s",
                failures,
                error,
            )
        self._outage_kind = kind

    def _leave(self, rows: Sequence[OutboxRow]) -> None:
        self._count(left=len(rows))
        self.receipts.resolve([row.message_id for row in rows], SendOutcome.LEFT)

    def _forget(self, batch: Sequence[_Wanted]) -> None:
        for each in batch:
            self._wanted.pop(each.row.message_id, None)

    def _on_dropped(self, hint: Hint) -> None:
        self.receipts.resolve([row.message_id for row in hint.rows], SendOutcome.LEFT)

    def _asked(self, what: str, question: Callable[[], _Result]) -> _Result | None:
        """Query the database; returns None after any error of its driver."""
        try:
            return question()
        except Exception as error:  # asyncpg and event loops raise more than SQLAlchemy's errors
            self._count(database_errors=1)
            _log.warning(
                "outbox %s failed, the watchdog takes over the rows: %s", what, _short(error)
            )
            return None

    def _count(self, **more: int) -> None:
        self._counts.update(more)


def _with_record(row: OutboxRow, record: bytes) -> OutboxRow:
    return OutboxRow(
        message_id=row.message_id,
        subject=row.subject,
        ordering_key=row.ordering_key,
        record=bytes(record),
        is_repeatable=row.is_repeatable,
    )


def _short(error: Exception) -> str:
    """The error in one line, with its class if SQLAlchemy does not name it."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
