"""Checks of a send request before anything is written.

In this order: the broker accepts messages; the disk has room above its reserve; the frame is valid
(shape, checksum, names, limits); and each record matches the checksum of its producer, so that a
record damaged in transit is refused and named instead of being stored and found at delivery. The
writer itself checks whether the commit queue has room.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Final

from qmq_broker.errors import InvalidRecordError, disk_full
from qmq_broker.service.delivery.subject_shares import SubjectShares, too_many
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.serving import ServingState
from qmq_broker.storage.logs.kinds import SENT_KINDS
from qmq_broker.storage.store import Store
from qmq_client.wire.checksum import crc32c
from qmq_client.wire.columns import byte_column, checksums, first_broken
from qmq_client.wire.delayed import CLOCKS_MS, check_due, record_due_at_ms
from qmq_client.wire.errors import InvalidMessageError
from qmq_client.wire.frame import FrameKind, MessageFrame, parse_message_frame
from qmq_client.wire.limits import Limits
from qmq_client.wire.message_id import format_message_id
from qmq_client.wire.names import check_not_own
from qmq_client.wire.record import DELAYED_FLAG, FLAGS_POSITION, KNOWN_FLAGS, record_message_id

#: The file system is asked for its free space once per this many bytes of requests.
FREE_SPACE_CHECK_BYTES: Final = 16 * 1024 * 1024
#: The flags of records that may be delivered at once.
_AT_ONCE: Final = bytes(flags for flags in KNOWN_FLAGS if not flags & DELAYED_FLAG)


class Intake:
    """The checks that every send passes. Belongs to the loop thread."""

    def __init__(
        self,
        store: Store,
        serving: ServingState,
        *,
        wire: Limits,
        limits: ServiceLimits,
        reserve_bytes: int,
        latest_ms: Callable[[], int],
        shares: SubjectShares,
    ) -> None:
        """`latest_ms` returns the time that due times are compared with; `shares` limits the subjects of a token."""
        self._shares = shares
        self._store = store
        self._serving = serving
        self._wire = wire
        self._subjects_max = limits.subjects
        self._reserve_bytes = reserve_bytes
        self._latest_ms = latest_ms
        self._subjects = {*store.subjects(), *store.schedule.pending_by_subject()}
        self._known_room_bytes = 0

    def check(
        self, data: bytes, may_send: Callable[[str], None] | None = None, *, owner: str = ""
    ) -> MessageFrame:
        """Check a request; returns its frame, ready to be stored. If it raises, nothing was changed.

        New subjects count against the share of the token named `owner`.
        """
        self._serving.check_takes_messages()
        self._check_room(len(data))
        frame = parse_message_frame(data, self._wire)
        if frame.header.kind not in SENT_KINDS:
            raise InvalidMessageError(
                field="frame kind",
                limit=" or ".join(sorted(kind.name for kind in SENT_KINDS)),
                value=frame.header.kind.name,
                remedy="Send messages in frames of these kinds; only the broker makes the others.",
            )
        for run in frame.runs:
            check_not_own(run.subject)
            if may_send is not None:
                may_send(run.subject)
        check_records(frame)
        flags = byte_column(frame, FLAGS_POSITION)
        check_flags(frame, flags)
        check_due_times(frame, flags, self._latest_ms(), self._wire)
        self._check_subjects(frame, owner)
        return frame

    def note_accepted(self, frame: MessageFrame, owner: str = "") -> None:
        """Record the subjects of a request that the writer accepted; those of refused requests do not count."""
        new = self._new_subjects(frame)
        if new:
            self._subjects.update(new)
            self._shares.note(new, owner, self._latest_ms())

    @property
    def subjects_count(self) -> int:
        """How many subjects count against the limit."""
        return len(self._subjects)

    def subjects(self) -> list[str]:
        """Those subjects, in any order. For any thread."""
        return list(self._subjects)

    def knows(self, subject: str) -> bool:
        """Whether there is such a subject."""
        return subject in self._subjects

    def forget(self, subject: str) -> None:
        """Forget a subject that no longer exists."""
        self._subjects.discard(subject)

    def remember(self, subject: str) -> None:
        """Record that the subject exists after all."""
        self._subjects.add(subject)

    def has_room(self) -> bool:
        """Whether the disk has room above its reserve."""
        return self._store.free_bytes() >= self._reserve_bytes

    def _new_subjects(self, frame: MessageFrame) -> list[str]:
        return [run.subject for run in frame.runs if run.subject not in self._subjects]

    def _check_subjects(self, frame: MessageFrame, owner: str) -> None:
        new = len(self._new_subjects(frame))
        if not new:
            return
        if len(self._subjects) + new > self._subjects_max:
            raise too_many("subjects", len(self._subjects), new, self._subjects_max)
        self._shares.check(new, owner)

    def _check_room(self, request_bytes: int) -> None:
        self._known_room_bytes -= request_bytes
        if self._known_room_bytes >= 0:
            return
        room_bytes = self._store.free_bytes() - self._reserve_bytes
        if room_bytes < request_bytes:
            raise disk_full(
                free_bytes=room_bytes + self._reserve_bytes,
                needed_bytes=request_bytes,
                reserve_bytes=self._reserve_bytes,
            )
        self._known_room_bytes = min(room_bytes, FREE_SPACE_CHECK_BYTES) - request_bytes


def check_records(frame: MessageFrame) -> None:
    """Raise `InvalidRecordError` naming the first record whose own checksum is wrong."""
    region = memoryview(frame.data)[frame.positions[0] : frame.positions[-1] + frame.lengths[-1]]
    first, records = 0, checksums(region, frame.lengths)
    for run in frame.runs:
        broken = first_broken(islice(records, run.count), crc32c(run.subject.encode()))
        if broken is not None:
            index = first + broken
            raise InvalidRecordError(
                f"record {index} of the request does not match its checksum under subject {run.subject}: "
                "it was altered after its producer made it",
                field=f"record {index}",
                remedy="Make the record again from its message.",
                message_id=format_message_id(record_message_id(frame.record(index))),
            )
        first += run.count


def check_flags(frame: MessageFrame, flags: bytes) -> None:
    """Raise `InvalidRecordError` naming a record that only a later version can read."""
    if unknown := flags.translate(None, KNOWN_FLAGS):
        index = flags.index(unknown[0])
        raise InvalidRecordError(
            f"record {index} of the request has flags {unknown[0]:#04x}, which this version of the broker "
            "does not know",
            field=f"record {index}",
            remedy="Upgrade the broker before its producers.",
            message_id=format_message_id(record_message_id(frame.record(index))),
        )


def check_due_times(frame: MessageFrame, flags: bytes, now_ms: int, limits: Limits) -> None:
    """Raise `InvalidMessageError` if delayed messages are not alone, or one is due too late."""
    is_delayed = frame.header.kind is FrameKind.DELAYED
    if not is_delayed and not flags.translate(None, _AT_ONCE):
        return
    latest_ms = now_ms + limits.delay_ms + CLOCKS_MS
    for index, position in enumerate(frame.positions):
        due_at_ms = record_due_at_ms(frame.data, position)
        if (due_at_ms is not None) is not is_delayed:
            raise InvalidMessageError(
                field=f"record {index}",
                limit="messages with a due time in frames of kind DELAYED, all others in MESSAGES",
                value="no due time" if is_delayed else "a due time",
                remedy="Send messages with and without a due time in separate frames.",
            )
        if due_at_ms is not None and due_at_ms > latest_ms:
            check_due(due_at_ms, now_ms, limits, field=f"due time of record {index}")
