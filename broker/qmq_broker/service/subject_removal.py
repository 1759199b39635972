"""The removal of an unused subject, after which it no longer counts against the limit of subjects.

Only an empty subject can be removed: no messages, no delayed messages and no groups. The writer
records the removal durably, between two commits. A message that is sent meanwhile is either
committed first, and prevents the removal; or it is committed afterwards, and the subject exists
again and continues at its next sequence.
"""

from __future__ import annotations

from collections.abc import Callable

from qmq_broker.errors import (
    BusyError,
    NoRoomError,
    NotEmptyError,
    being_removed,
    no_subject,
)
from qmq_broker.service.delivery.delivery import Delivery
from qmq_broker.service.intake import Intake
from qmq_broker.service.query import SubjectStatus
from qmq_broker.service.writer import CommitWriter
from qmq_broker.storage.files.retained import REMOVED_MAX
from qmq_broker.storage.store import Store
from qmq_client.wire.names import check_not_own

#: Called in the loop thread with the removed subject, or the error if it still exists.
OnRemoved = Callable[[SubjectStatus | Exception], None]


class SubjectRemoval:
    """Belongs to the loop thread."""

    def __init__(
        self, store: Store, writer: CommitWriter, delivery: Delivery, intake: Intake
    ) -> None:
        self._store = store
        self._writer = writer
        self._delivery = delivery
        self._intake = intake

    def remove(self, subject: str, now_ms: int, on_done: OnRemoved) -> None:
        """Remove a subject. If it does not exist or is not empty, raises `ServiceError` or passes it to `on_done`."""
        check_not_own(subject)
        last = self._last(subject)
        closing = self._delivery.registry.closing
        if subject in closing:
            raise being_removed(subject)
        self._check_unused(subject)
        if self._store.queue(subject) is None:  # all of its messages were withdrawn or cancelled
            self._forget(subject, now_ms)
            on_done(last)
            return
        if self._store.retention.removed_subjects >= REMOVED_MAX:
            raise BusyError(
                f"{self._store.retention.removed_subjects} subjects are removed; allowed: {REMOVED_MAX}",
                retry_after_s=60.0,
                field="removed subjects",
                limit=str(REMOVED_MAX),
                value=str(self._store.retention.removed_subjects),
                remedy="Send to the removed ones again instead of to new ones.",
            )
        closing.add(
            subject
        )  # no group may be created on it now: its position would be that of the old subject
        self._intake.forget(subject)

        def done(outcome: SubjectStatus | Exception) -> None:
            closing.discard(subject)
            if isinstance(outcome, Exception):
                self._intake.remember(subject)
            elif not self._intake.knows(subject):
                self._delivery.subject_shares.forget(subject, now_ms)
            on_done(outcome)

        self._writer.change(
            lambda: self._removed(last), done, refusals=(BusyError, NotEmptyError, NoRoomError)
        )

    def _last(self, subject: str) -> SubjectStatus:
        queue = self._store.queue(subject)
        if queue is not None:
            return SubjectStatus(
                subject=subject,
                first_sequence=queue.first_sequence,
                next_sequence=queue.next_sequence,
            )
        if not self._intake.knows(subject):
            raise no_subject(subject)
        return SubjectStatus(subject=subject, first_sequence=0, next_sequence=0)

    def _check_unused(self, subject: str) -> None:
        groups = sum(group.state.subject == subject for group in self._delivery.registry)
        if groups:
            raise NotEmptyError(
                subject=subject,
                field="groups",
                value=str(groups),
                remedy="Remove its groups first.",
            )
        pending = self._store.schedule.pending_by_subject().get(subject, 0)
        if pending:
            remedy = "Wait until they are due, or cancel them: qmq delayed cancel."
            raise NotEmptyError(
                subject=subject, field="delayed messages", value=str(pending), remedy=remedy
            )
        queue = self._store.queue(subject)
        if queue is not None and queue.next_sequence > queue.first_sequence:
            raise _has_messages(subject, queue.next_sequence - queue.first_sequence)

    def _removed(self, last: SubjectStatus) -> SubjectStatus:
        """In the writer's thread."""
        if not self._store.remove_subject(last.subject):
            queue = self._store.queue(last.subject)
            left = 0 if queue is None else queue.next_sequence - queue.first_sequence
            if left == 0:
                raise BusyError(
                    f"retention is removing segments of the log, and subject {last.subject} waits for it",
                    field="subject",
                    value=last.subject,
                    remedy="Try again later.",
                    retry_after_s=1.0,
                )
            raise _has_messages(last.subject, left)
        return last

    def _forget(self, subject: str, now_ms: int) -> None:
        self._intake.forget(subject)
        self._delivery.subject_shares.forget(subject, now_ms)


def _has_messages(subject: str, count: int) -> NotEmptyError:
    return NotEmptyError(
        subject=subject,
        field="messages",
        value=str(count),
        remedy="Try again when retention has deleted them: it deletes by age, a segment of the log at a time.",
    )
