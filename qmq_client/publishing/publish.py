"""Publishes a batch of outbox rows and returns the outcome of each.

Shared by the publisher thread and the watchdog, so that both treat rows alike; it uses no database
and no clock. A batch is one frame and one request if it fits. A row counts as sent only if an
answer names its frame.

A fault only affects its row: a record with a wrong checksum, or one that the broker refuses by its
id, is parked at once and the other rows continue; a batch whose refusal names no row is halved
until only the faulty rows are left. Rows that get an invalid answer are parked after
`max_attempts`. An unreachable broker is not the fault of a row: an outage does not count as an
attempt and, however long it lasts, parks no row. The same holds for a broker that does not know
this process's token (401), and for other servers at its address, like a proxy. Rows of a subject
that the token must not send to (403), or too large for a proxy (413), wait, without an attempt, and
do not delay others.

A row with a dedupe id that the broker has stored before, with any content, counts as sent
(`wire/message_id.py`). A row with an ordering key is not sent before an earlier one of its key that
was not accepted: it is returned without an attempt. `ordering.py` handles earlier ones outside the
batch.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from qmq_client.errors import (
    BrokerAnswerError,
    BrokerBusyError,
    BrokerRefusedError,
    BrokerUnreachableError,
    NotTheBrokerError,
    ProtocolError,
    TransportError,
)
from qmq_client.outbox.row import BatchOutcome, FailedRow, OutboxRow, ParkedRow
from qmq_client.publishing.forbidden import ForbiddenSubjects
from qmq_client.request_headers import DEDUPE_HEADER
from qmq_client.retry import Backoff
from qmq_client.transport.port import Transport
from qmq_client.wire.frame import FrameKind, build_message_frame, read_header
from qmq_client.wire.limits import (
    DEFAULT_LIMITS,
    FRAME_OVERHEAD_BYTES_MAX,
    SUBJECTS_PER_FRAME_MAX,
    Limits,
)
from qmq_client.wire.message_id import (
    dedupe_message_id,
    format_message_id,
    is_dedupe_id,
    parse_message_id,
)
from qmq_client.wire.record import (
    decode_record,
    is_delayed_record,
    record_message_id,
    verify_record,
)

_log = logging.getLogger("qmq.publish")

#: Refusals that a single message can cause. Others (no such route, not allowed) mean that this is
#: not the intended broker: an outage, not a fault of a row.
_CAUSED_BY_A_MESSAGE: Final = frozenset({400, 409, 413, 422})
#: A proxy in front of the broker may have a lower limit than the broker, and accept a smaller request.
_TOO_LARGE_STATUS: Final = 413
#: The refusal of an id that was already stored with other content.
_KNOWN_STATUS: Final = 409
_KNOWN_CODE: Final = "id_conflict"
#: The error of a row with an ordering key that was returned untried.
WAITS_FOR_EARLIER: Final = "waits for an earlier message of its ordering key"
_ERROR_CHARACTERS_MAX: Final = 500
#: Only a person can grant a missing role, or raise a limit; more frequent attempts would only fill logs.
_FORBIDDEN_DELAY_MS: Final = 10_000
#: Subject, its count and length of name, record length and tag hash; see `wire/frame.py`.
_TABLE_BYTES_PER_ROW: Final = 160


def publish_rows(
    rows: Sequence[OutboxRow],
    *,
    transport: Transport,
    backoff: Backoff,
    max_attempts: int,
    random: Callable[[], float],
    limits: Limits = DEFAULT_LIMITS,
    forbidden: ForbiddenSubjects | None = None,
) -> BatchOutcome:
    """Send `rows` in as few requests as the limits allow; a failed request does not raise.

    Rows of one ordering key are sent in the given order. Of rows with the same id only the first is
    sent. A sender keeps `forbidden` from batch to batch, so that not every refusal is logged.
    """
    batch = _Batch(
        backoff=backoff,
        max_attempts=max_attempts,
        random=random,
        forbidden=forbidden or ForbiddenSubjects(),
    )
    # Twice in one frame, a dedupe id would be refused as known although nothing is stored yet.
    first_of_each = {row.message_id: row for row in reversed(rows)}
    alone = [row for row in rows if first_of_each[row.message_id] is row]
    whole = [row for row in alone if batch.is_whole(row, limits)]
    groups = deque(_groups(whole, limits))
    while groups:
        group = batch.ready(groups.popleft())
        if batch.unreachable:
            batch.put_off(group, batch.last_error)
        elif group:
            groups.extendleft(reversed(batch.send(group, transport, limits)))
    return batch.outcome()


@dataclass(slots=True, kw_only=True)
class _Batch:
    """A batch in progress, with the outcomes so far."""

    backoff: Backoff
    max_attempts: int
    random: Callable[[], float]
    forbidden: ForbiddenSubjects
    sent: list[bytes] = field(default_factory=list)
    failed: list[FailedRow] = field(default_factory=list)
    parked: list[ParkedRow] = field(default_factory=list)
    unreachable: bool = False
    retry_after_s: float = 0.0
    last_error: str = ""
    requests: int = 0
    #: Subjects with ordering keys of which a row was not accepted: later ones must wait.
    held: set[tuple[str, str]] = field(default_factory=set)

    def is_whole(self, row: OutboxRow, limits: Limits) -> bool:
        """Whether the record is undamaged and may be sent; parks it if not.

        Rows are checked in order, so those after a parked one of their key are returned.
        """
        if self.held and not self.ready([row]):
            return False
        if len(row.record) > limits.record_bytes:
            self.park(row, f"record of {len(row.record)} bytes; allowed: {limits.record_bytes}")
            return False
        try:
            verify_record(row.subject, row.record)
        except ProtocolError as error:
            self.park(row, f"damaged in the outbox: {error}")
            return False
        if record_message_id(row.record) != row.message_id:
            self.park(row, "damaged in the outbox: the record carries another message id")
            return False
        return True

    def ready(self, rows: list[OutboxRow]) -> list[OutboxRow]:
        """The rows without an earlier unsent one of their ordering key; returns the others to the outbox."""
        if not self.held:
            return rows
        checked = [(row, ordering_pair(row) not in self.held) for row in rows]
        for row, is_ready in checked:
            if not is_ready:
                delay_ms = self.backoff.delay_ms(1, self.random())
                self._return(row, delay_ms, WAITS_FOR_EARLIER, is_attempt=False)
        return [row for row, is_ready in checked if is_ready]

    def send(
        self, rows: list[OutboxRow], transport: Transport, limits: Limits
    ) -> list[list[OutboxRow]]:
        """Send one request. If it was refused, returns the groups to send instead."""
        try:
            frame = _build(rows, limits)
            self.requests += 1
            answer = transport.send(frame)
            sent_crc = read_header(frame).body_crc
            if answer.frame_crc != sent_crc or answer.count != len(rows):
                raise BrokerAnswerError(
                    f"sent frame {sent_crc:#010x} with {len(rows)} messages, the answer names "
                    f"{answer.frame_crc:#010x} with {answer.count}"
                )
        except BrokerRefusedError as error:
            return self._split(rows, error)
        except BrokerBusyError as error:
            self.unreachable = True
            self.retry_after_s = max(self.retry_after_s, error.retry_after_s)
            self.put_off(rows, _text(error))
        except BrokerUnreachableError as error:
            if isinstance(error, NotTheBrokerError) and error.status == _TOO_LARGE_STATUS:
                return self._halve(rows, error)
            self.unreachable = True
            self.put_off(rows, _text(error))
        except TransportError as error:
            self.fail_or_park(rows, _text(error))
        except Exception as error:  # unexpected: one row may be the cause, and no other may wait
            if len(rows) == 1:
                _log.exception("message %s", format_message_id(rows[0].message_id))
            return self._halve(rows, error)
        else:
            self.sent += [row.message_id for row in rows]
            self.forbidden.taken(row.subject for row in rows)
        return []

    def _split(self, rows: list[OutboxRow], error: BrokerRefusedError) -> list[list[OutboxRow]]:
        named = b""
        if error.answer.message_id:
            with contextlib.suppress(ValueError):
                named = parse_message_id(error.answer.message_id)
        others = [row for row in rows if row.message_id != named]
        if len(others) < len(rows):
            row = next(row for row in rows if row.message_id == named)
            if _is_known(error) and _has_dedupe_key(row):
                self.sent.append(named)
            else:
                self.park(row, _text(error))
            return [others] if others else []
        if forbidden := _forbidden(rows, error):
            return self._hold_back(rows, forbidden, error)
        if error.status not in _CAUSED_BY_A_MESSAGE:
            self.unreachable = True
            self.put_off(rows, _text(error))
            return []
        return self._halve(rows, error)

    def _hold_back(
        self, rows: list[OutboxRow], subject: str, error: BrokerRefusedError
    ) -> list[list[OutboxRow]]:
        """Leave the rows of a subject that this token must not send to; the others continue."""
        self.forbidden.refused(subject, error)
        for row in rows:
            if row.subject == subject:
                self._return(row, _FORBIDDEN_DELAY_MS, _text(error), is_attempt=False)
        others = [row for row in rows if row.subject != subject]
        return [others] if others else []

    def _halve(self, rows: list[OutboxRow], error: Exception) -> list[list[OutboxRow]]:
        if len(rows) == 1:
            if isinstance(error, NotTheBrokerError):
                _log.warning("message %s waits: %s", format_message_id(rows[0].message_id), error)
                self._return(rows[0], _FORBIDDEN_DELAY_MS, _text(error), is_attempt=False)
            else:
                self.fail_or_park(rows, _text(error))
            return []
        middle = len(rows) // 2
        return [rows[:middle], rows[middle:]]

    def put_off(self, rows: Sequence[OutboxRow], error: str) -> None:
        """Return rows because of an outage: without an attempt, and due again soon.

        The sender itself pauses while the outage lasts. Growing intervals for the rows would only
        delay them when it is over.
        """
        self.last_error = error
        at_least_ms = round(self.retry_after_s * 1000)
        for row in rows:
            delay_ms = max(self.backoff.delay_ms(1, self.random()), at_least_ms)
            self._return(row, delay_ms, error, is_attempt=False)

    def fail(self, row: OutboxRow, error: str) -> None:
        """Return a row after an attempt that failed because of it."""
        delay_ms = self.backoff.delay_ms(row.attempts + 1, self.random())
        self._return(row, delay_ms, error, is_attempt=True)

    def _return(self, row: OutboxRow, delay_ms: int, error: str, *, is_attempt: bool) -> None:
        self._hold(row)
        self.failed.append(
            FailedRow(
                message_id=row.message_id, delay_ms=delay_ms, error=error, is_attempt=is_attempt
            )
        )

    def fail_or_park(self, rows: Sequence[OutboxRow], error: str) -> None:
        """Return rows; park those whose attempts are used up."""
        for row in rows:
            if row.attempts + 1 >= self.max_attempts:
                self.park(row, error)
            else:
                self.fail(row, error)

    def park(self, row: OutboxRow, error: str) -> None:
        """Park the row."""
        self._hold(row)
        self.parked.append(ParkedRow(message_id=row.message_id, error=error))

    def _hold(self, row: OutboxRow) -> None:
        if (pair := ordering_pair(row)) is not None:
            self.held.add(pair)

    def outcome(self) -> BatchOutcome:
        return BatchOutcome(
            sent=tuple(self.sent),
            failed=tuple(self.failed),
            parked=tuple(self.parked),
            unreachable=self.unreachable,
            retry_after_s=self.retry_after_s,
            requests=self.requests,
        )


def ordering_pair(row: OutboxRow) -> tuple[str, str] | None:
    """The row's subject and ordering key; None if it is not ordered."""
    return None if row.ordering_key is None else (row.subject, row.ordering_key)


def _forbidden(rows: Sequence[OutboxRow], error: BrokerRefusedError) -> str:
    """The subject that a 403 names, if it is one of these; empty for a refusal of the caller."""
    subject = error.answer.value if error.status == 403 and error.answer.field == "subject" else ""
    return subject if any(row.subject == subject for row in rows) else ""


def _has_dedupe_key(row: OutboxRow) -> bool:
    """Whether the row's id was really derived from a dedupe key, and not only looks like it."""
    if not is_dedupe_id(row.message_id):
        return False
    headers = dict(decode_record(row.subject, row.record).headers)
    key = headers.get(DEDUPE_HEADER)
    return key is not None and dedupe_message_id(row.subject, key) == row.message_id


def _is_known(error: BrokerRefusedError) -> bool:
    return error.status == _KNOWN_STATUS and error.answer.code == _KNOWN_CODE


def _groups(rows: Sequence[OutboxRow], limits: Limits) -> Iterator[list[OutboxRow]]:
    """Rows in groups of one frame each."""
    for of_one_kind in _of_one_kind(rows):
        group: list[OutboxRow] = []
        frame_bytes = FRAME_OVERHEAD_BYTES_MAX
        subjects: set[str] = set()
        for row in of_one_kind:
            row_bytes = len(row.record) + _TABLE_BYTES_PER_ROW
            if group and (
                len(group) == limits.records_per_frame
                or frame_bytes + row_bytes > limits.frame_bytes
                or (row.subject not in subjects and len(subjects) == SUBJECTS_PER_FRAME_MAX)
            ):
                yield group
                group, frame_bytes, subjects = [], FRAME_OVERHEAD_BYTES_MAX, set()
            group.append(row)
            frame_bytes += row_bytes
            subjects.add(row.subject)
        if group:
            yield group


def _of_one_kind(rows: Sequence[OutboxRow]) -> Iterator[Sequence[OutboxRow]]:
    """Delayed messages need separate frames; two frames if no order is required."""
    if any(row.ordering_key is not None for row in rows):
        for _, run in groupby(rows, lambda row: is_delayed_record(row.record)):
            yield list(run)
        return
    for is_delayed in (False, True):
        yield [row for row in rows if is_delayed_record(row.record) is is_delayed]


def _build(rows: Sequence[OutboxRow], limits: Limits) -> bytes:
    records: dict[str, list[bytes]] = {}
    for row in rows:
        records.setdefault(row.subject, []).append(row.record)
    kind = FrameKind.DELAYED if is_delayed_record(rows[0].record) else FrameKind.MESSAGES
    return build_message_frame(records, kind=kind, limits=limits)


def _text(error: Exception) -> str:
    """The error in a form that every database accepts: bounded, without NUL, and in ASCII.

    An application may speak Latin-1 with its server, and a text that cannot be encoded there would
    keep the row's outcome from being stored.
    """
    text = f"{type(error).__name__}: {error}".replace("\0", " ").replace("…", "...")
    return text.encode("ascii", "backslashreplace").decode("ascii")[:_ERROR_CHARACTERS_MAX]
