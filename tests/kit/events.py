"""The events of a history: one frozen struct per kind, one short JSON object per event.

Every event carries `at_ns`, the system-wide monotonic clock of the machine, so that the events of
all processes can be merged. Operations whose beginning matters carry `began_ns` too: only what
ended before another thing began is certainly earlier, and the checker never accuses on less.

When an event must be written, and what its loss in the tail of a killed process does:

| written | kinds | a lost tail |
|---|---|---|
| before COMMIT is called | attempt | makes a delivered message ALIEN: loud |
| before the handler runs | delivered | impossible once the handler ran; before that nobody saw it |
| before the fault is injected, after it ended | fault, limit | makes good look bad |
| before the request, or at the deadline | nacked, lease_expired, ack_unknown | makes good look bad |
| after the answer | commit, rollback, unknown, accepted, acked, owner_write, error | was seen by \
nobody but the dead process: as good as an answer that never came |
| at the end of the run, by the collector | truth, stored, effect, dead_letter, parked, drained, \
stopped | leaves the run unsettled, which is a finding |
"""

from __future__ import annotations

import time
from typing import Final, Literal, TypeAlias

import msgspec

#: Keys of the JSON objects, for the fields that nearly every event has. Rare fields keep their name.
SMALL_KEYS: Final = {
    "at_ns": "t",
    "process": "p",
    "message_id": "m",
    "subject": "s",
    "key": "k",
    "body_hash": "h",
    "transaction_id": "x",
    "sequence": "q",
    "offset": "o",
    "group": "g",
    "consumer": "c",
    "attempt": "n",
    "began_ns": "b",
}

#: A sequence that the writer of the event was not told.
SEQUENCE_UNKNOWN: Final = -1

Phase: TypeAlias = Literal["begin", "end"]
RowAction: TypeAlias = Literal["claim", "release", "remove"]


class Event(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    gc=False,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="e",
    rename=SMALL_KEYS,
):
    """Something one process did or saw."""

    #: Monotonic time of the machine; stamped when the event is made unless given.
    at_ns: int = msgspec.field(default_factory=time.monotonic_ns)
    #: Name of the process; set by the reader from the file's name, never written.
    process: str = ""


class Started(Event, frozen=True, kw_only=True, tag="started"):
    """A process opened its history; written by `History.open`."""

    pid: int


class Attempt(Event, frozen=True, kw_only=True, tag="attempt"):
    """The generator is about to send this message inside a transaction.

    A savepoint that may be rolled back alone is a transaction id of its own. An empty transaction
    id is a message sent outside any transaction: it is owed once anybody saw it accepted,
    stored or delivered.
    """

    message_id: str
    subject: str
    body_hash: str
    transaction_id: str = ""
    key: str = ""
    #: Monotonic time before which it must not be delivered; 0: at once.
    due_ns: int = 0
    #: The same by the wall clock, to compare with the broker's; 0: not compared.
    due_at_ms: int = 0


class Commit(Event, frozen=True, kw_only=True, tag="commit"):
    """The application saw the commit succeed; `at_ns` is after the answer."""

    transaction_id: str


class Rollback(Event, frozen=True, kw_only=True, tag="rollback"):
    """The application saw the transaction undone, by its own wish or by an error that proves it."""

    transaction_id: str


class Unknown(Event, frozen=True, kw_only=True, tag="unknown"):
    """The application cannot know: connection lost in COMMIT, or cancelled while awaiting it."""

    transaction_id: str


class Truth(Event, frozen=True, kw_only=True, tag="truth"):
    """What the business table says at the end. It outranks whatever the application saw."""

    transaction_id: str
    is_committed: bool


class Accepted(Event, frozen=True, kw_only=True, tag="accepted"):
    """The broker answered that it has the message durably."""

    message_id: str
    subject: str
    sequence: int = SEQUENCE_UNKNOWN


class Stored(Event, frozen=True, kw_only=True, tag="stored"):
    """One entry of a subject's consume queue, read from the broker's files at the end.

    `offset` is where its record stands in the commit log. A delayed message counts once, as
    released. An empty hash is not compared.
    """

    message_id: str
    subject: str
    sequence: int
    offset: int
    body_hash: str = ""


class Delivered(Event, frozen=True, kw_only=True, tag="delivered"):
    """A consumer holds the message and is about to handle it. `attempt` counts from 1."""

    group: str
    consumer: str
    message_id: str
    subject: str
    attempt: int
    body_hash: str
    sequence: int = SEQUENCE_UNKNOWN
    #: Wall clock of the broker at hand-out; 0 when it does not say.
    broker_at_ms: int = 0


class Acked(Event, frozen=True, kw_only=True, tag="acked"):
    """The broker confirmed the acknowledgement of this attempt. A refused one is no event."""

    group: str
    consumer: str
    message_id: str
    attempt: int
    #: Before the request left.
    began_ns: int


class AckUnknown(Event, frozen=True, kw_only=True, tag="ack_unknown"):
    """An acknowledgement was sent and its answer never came."""

    group: str
    consumer: str
    message_id: str
    attempt: int
    #: Before the request left.
    began_ns: int


class Nacked(Event, frozen=True, kw_only=True, tag="nacked"):
    """The consumer is about to give the message back; `at_ns` is before the request leaves."""

    group: str
    consumer: str
    message_id: str
    attempt: int


class LeaseExpired(Event, frozen=True, kw_only=True, tag="lease_expired"):
    """A lease ended unsettled. `at_ns` is the deadline by the holder's own clock or the broker's.

    Never made from the broker's refusal of a late acknowledgement: that is what is to be judged.
    """

    group: str
    consumer: str
    message_id: str
    attempt: int


class DeadLetter(Event, frozen=True, kw_only=True, tag="dead_letter"):
    """The group gave the message up and keeps it with the reason."""

    group: str
    message_id: str
    reason: str = ""
    #: When it was handed out in its last attempt, where somebody saw that at the broker: its
    #: consumer need not have got the answer.
    last_given_ns: int = 0


class Parked(Event, frozen=True, kw_only=True, tag="parked"):
    """The outbox row used up its attempts and waits for a person."""

    message_id: str
    reason: str = ""


class Effect(Event, frozen=True, kw_only=True, tag="effect"):
    """Rows this message left in the group's business table, which has no unique index on it."""

    group: str
    message_id: str
    times: int = 1


class Fault(Event, frozen=True, kw_only=True, tag="fault"):
    """A fault begins or ends. `target` is a process or consumer name; kinds: `excuses.py`."""

    kind: str
    target: str
    phase: Phase


class Error(Event, frozen=True, kw_only=True, tag="error"):
    """A client got an error answer or none in time."""

    operation: str
    code: str
    text: str = ""


class Limit(Event, frozen=True, kw_only=True, tag="limit"):
    """A stated limit is exceeded on purpose from `begin` to `end`, so refusals are right."""

    name: str
    phase: Phase


class Heal(Event, frozen=True, kw_only=True, tag="heal"):
    """All faults are removed and all processes run again."""


class Drained(Event, frozen=True, kw_only=True, tag="drained"):
    """The outbox is empty and every group has settled everything."""


class OwnerWrite(Event, frozen=True, kw_only=True, tag="owner_write"):
    """A statement on one outbox row that names message id and token, and what it changed."""

    message_id: str
    token: str
    action: RowAction
    changed_rows: int
    #: Before the statement was sent.
    began_ns: int


class Stopped(Event, frozen=True, kw_only=True, tag="stopped"):
    """A process stopped in order; what it left behind, each of which must be 0."""

    threads: int = 0
    leases: int = 0
    connections: int = 0
    temporary_files: int = 0


class Torn(Event, frozen=True, kw_only=True, tag="torn"):
    """The reader met an incomplete line where a process was killed. Never written."""

    size_bytes: int


AnyEvent: TypeAlias = (
    Started
    | Attempt
    | Commit
    | Rollback
    | Unknown
    | Truth
    | Accepted
    | Stored
    | Delivered
    | Acked
    | AckUnknown
    | Nacked
    | LeaseExpired
    | DeadLetter
    | Parked
    | Effect
    | Fault
    | Error
    | Limit
    | Heal
    | Drained
    | OwnerWrite
    | Stopped
    | Torn
)
