"""A builder of hand-made histories: each call is one thing that happened, one millisecond later."""

from __future__ import annotations

from typing import Self

from tests.kit.events import (
    Accepted,
    Acked,
    AckUnknown,
    AnyEvent,
    Attempt,
    Commit,
    DeadLetter,
    Delivered,
    Drained,
    Effect,
    Error,
    Fault,
    Heal,
    LeaseExpired,
    Limit,
    Nacked,
    OwnerWrite,
    Parked,
    Phase,
    Rollback,
    RowAction,
    Started,
    Stopped,
    Stored,
    Truth,
    Unknown,
)
from tests.kit.expectations import NS_PER_MS, Group

SUBJECT = "bookings"
GROUP = "billing"
GROUPS = {GROUP: Group(subjects=frozenset({SUBJECT}))}
ORDERED = {GROUP: Group(subjects=frozenset({SUBJECT}), is_ordered=True)}


class Scene:
    """Collects events. What is not said happens rightly: bytes, places, answers."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.now_ms = 0
        self._next_sequence = 0
        self._sequence_of: dict[str, int] = {}

    @property
    def now_ns(self) -> int:
        return self.now_ms * NS_PER_MS

    def add(self, event: AnyEvent) -> Self:
        self.events.append(event)
        return self

    def wait(self, duration_ms: int = 1) -> Self:
        self.now_ms += duration_ms
        return self

    def attempt(
        self, *ids: str, tx: str = "", key: str = "", due_ns: int = 0, due_at_ms: int = 0
    ) -> Self:
        for message_id in ids:
            self.wait().add(
                Attempt(
                    at_ns=self.now_ns,
                    message_id=message_id,
                    subject=SUBJECT,
                    key=key,
                    body_hash=f"hash-{message_id}",
                    transaction_id=tx,
                    due_ns=due_ns,
                    due_at_ms=due_at_ms,
                )
            )
        return self

    def commit(self, tx: str) -> Self:
        return self.wait().add(Commit(at_ns=self.now_ns, transaction_id=tx))

    def rollback(self, tx: str) -> Self:
        return self.wait().add(Rollback(at_ns=self.now_ns, transaction_id=tx))

    def unknown(self, tx: str) -> Self:
        return self.wait().add(Unknown(at_ns=self.now_ns, transaction_id=tx))

    def truth(self, tx: str, is_committed: bool) -> Self:
        return self.wait().add(
            Truth(at_ns=self.now_ns, transaction_id=tx, is_committed=is_committed)
        )

    def store(self, *ids: str, sequence: int | None = None, body_hash: str | None = None) -> Self:
        for message_id in ids:
            place = self._next_sequence if sequence is None else sequence
            self._next_sequence = place + 1
            self._sequence_of[message_id] = place
            self.wait().add(
                Stored(
                    at_ns=self.now_ns,
                    message_id=message_id,
                    subject=SUBJECT,
                    sequence=place,
                    offset=self.now_ms * 100,
                    body_hash=f"hash-{message_id}" if body_hash is None else body_hash,
                )
            )
        return self

    def accept(self, *ids: str, subject: str = SUBJECT, sequence: int | None = None) -> Self:
        for message_id in ids:
            place = self._sequence_of.get(message_id, -1) if sequence is None else sequence
            self.wait().add(
                Accepted(at_ns=self.now_ns, message_id=message_id, subject=subject, sequence=place)
            )
        return self

    def deliver(
        self,
        *ids: str,
        to: str = "c1",
        attempt: int = 1,
        group: str = GROUP,
        subject: str = SUBJECT,
        body_hash: str | None = None,
        sequence: int | None = None,
        broker_at_ms: int = 0,
    ) -> Self:
        for message_id in ids:
            place = self._sequence_of.get(message_id, -1) if sequence is None else sequence
            self.wait().add(
                Delivered(
                    at_ns=self.now_ns,
                    group=group,
                    consumer=to,
                    message_id=message_id,
                    subject=subject,
                    sequence=place,
                    attempt=attempt,
                    body_hash=f"hash-{message_id}" if body_hash is None else body_hash,
                    broker_at_ms=broker_at_ms,
                )
            )
        return self

    def ack(self, *ids: str, by: str = "c1", attempt: int = 1, has_effect: bool = True) -> Self:
        """Confirmed acknowledgement, and the row the handler's transaction left."""
        for message_id in ids:
            began_ns = self.wait().now_ns
            self.wait().add(
                Acked(
                    at_ns=self.now_ns,
                    group=GROUP,
                    consumer=by,
                    message_id=message_id,
                    attempt=attempt,
                    began_ns=began_ns,
                )
            )
            if has_effect:
                self.effect(message_id)
        return self

    def ack_unknown(self, message_id: str, by: str = "c1", attempt: int = 1) -> Self:
        self.wait()
        return self.add(
            AckUnknown(
                at_ns=self.now_ns,
                group=GROUP,
                consumer=by,
                message_id=message_id,
                attempt=attempt,
                began_ns=self.now_ns,
            )
        )

    def nack(self, message_id: str, by: str = "c1", attempt: int = 1) -> Self:
        self.wait()
        return self.add(
            Nacked(
                at_ns=self.now_ns, group=GROUP, consumer=by, message_id=message_id, attempt=attempt
            )
        )

    def lease_end(self, message_id: str, of: str = "c1", attempt: int = 1) -> Self:
        self.wait(30_000)
        return self.add(
            LeaseExpired(
                at_ns=self.now_ns, group=GROUP, consumer=of, message_id=message_id, attempt=attempt
            )
        )

    def dead(self, message_id: str, last_given_ns: int = 0) -> Self:
        return self.wait().add(
            DeadLetter(
                at_ns=self.now_ns,
                group=GROUP,
                message_id=message_id,
                reason="attempts",
                last_given_ns=last_given_ns,
            )
        )

    def park(self, message_id: str) -> Self:
        return self.wait().add(Parked(at_ns=self.now_ns, message_id=message_id))

    def effect(self, *ids: str, times: int = 1, group: str = GROUP) -> Self:
        for message_id in ids:
            self.wait().add(
                Effect(at_ns=self.now_ns, group=group, message_id=message_id, times=times)
            )
        return self

    def fault(self, kind: str, target: str, phase: Phase = "begin") -> Self:
        return self.wait().add(Fault(at_ns=self.now_ns, kind=kind, target=target, phase=phase))

    def crash(self, target: str, down_ms: int = 100) -> Self:
        return self.fault("crash", target).wait(down_ms).fault("crash", target, "end")

    def limit(self, name: str, phase: Phase) -> Self:
        return self.wait().add(Limit(at_ns=self.now_ns, name=name, phase=phase))

    def error(self, operation: str = "send", code: str = "503") -> Self:
        return self.wait().add(Error(at_ns=self.now_ns, operation=operation, code=code))

    def heal(self) -> Self:
        return self.wait().add(Heal(at_ns=self.now_ns))

    def drained(self) -> Self:
        return self.wait().add(Drained(at_ns=self.now_ns))

    def row(
        self, action: RowAction, token: str, changed: int, message_id: str = "m1", took_ms: int = 1
    ) -> Self:
        began_ns = self.wait().now_ns
        self.wait(took_ms)
        return self.add(
            OwnerWrite(
                at_ns=self.now_ns,
                message_id=message_id,
                token=token,
                action=action,
                changed_rows=changed,
                began_ns=began_ns,
            )
        )

    def started(self) -> Self:
        return self.wait().add(Started(at_ns=self.now_ns, process="app", pid=1))

    def stopped(self, threads: int = 0, leases: int = 0) -> Self:
        return self.wait().add(
            Stopped(at_ns=self.now_ns, process="app", threads=threads, leases=leases)
        )

    def sent(self, *ids: str, key: str = "") -> Self:
        """Each message in a committed transaction of its own, stored and accepted."""
        for message_id in ids:
            tx = f"t-{message_id}"
            self.attempt(message_id, tx=tx, key=key).commit(tx).truth(tx, True)
        return self.store(*ids).accept(*ids)

    def handled(self, *ids: str) -> Self:
        """Delivered, acknowledged, one effect each."""
        for message_id in ids:
            self.deliver(message_id).ack(message_id)
        return self
