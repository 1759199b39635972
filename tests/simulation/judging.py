"""The verdict on one played world: what is on the disks at the end against what was promised.

Most is asked by the checker that also judges runs of real processes (`tests/kit`): lost, ghosts, altered,
doubled, out of order, effects, fences. Background it stand what the row watch and the hand-outs found, and the
few questions that only a world with played clocks can answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import Final

from qmq_broker.storage.store import Store
from qmq_client.group.dead_letters import EXPIRED
from qmq_client.wire.message_id import format_message_id, parse_message_id
from tests.kit.checker import check
from tests.kit.events import Acked, AnyEvent, DeadLetter, Delivered, Effect, Parked, Stored, Truth
from tests.kit.expectations import Group, Promises
from tests.kit.verdict import Oracle
from tests.simulation.broker import window_ids
from tests.simulation.consuming import LEASE_MS
from tests.simulation.database import Databases
from tests.simulation.disk import SLOW_SYNC_US, SYNC_US
from tests.simulation.ears import hash_of
from tests.simulation.plan import ORDERS, GroupPlan, Kind, Trouble
from tests.simulation.scheduler import MS
from tests.simulation.world import World

#: The interval of the action log's sync, and two syncs beside it: the one under way and the next.
_ACK_DURABLE_MS: Final = 110


class Judge:
    """Asks everything once the world is at rest. Requires: the broker lives."""

    def __init__(self, world: World, databases: Databases) -> None:
        life = world.host.life
        assert life is not None
        self._world = world
        self._databases = databases
        self._broker = life.broker
        self._store: Store = life.store
        self._plan = world.plan
        world.shelf.compare(life.store)
        #: Records by subject, in order of their sequences.
        self._records = {
            subject: [one.record for one in kept] for subject, kept in world.shelf.kept.items()
        }

        ids = Counter(one.message_id for records in self._records.values() for one in records)
        #: Messages at two places, as far as that is allowed: an ack does not say which of both it is of.
        self._stored_twice = {format_message_id(one) for one, count in ids.items() if count > 1}
        #: Groups and the messages that went by force before they had got them.
        self._forced: set[tuple[str, str]] = set()

    def faults(self) -> list[str]:
        """What is wrong, in sentences."""
        self._tell_the_end()
        world = self._world
        found = [*world.rows.faults, *world.handouts.faults, *world.shelf.faults]
        found += world.host.remembered.faults
        found += world.archive.faults
        found += self._judge_forced()
        found += self._judge_dead_letters()
        found += self._judge_replayed()
        found += self._judge_once()
        found += self._judge_acks()
        found += self._judge_audits()
        found += self._judge_cancelled()
        verdict = check(self._history(), groups=self._groups(), promises=self._promises())
        found += [
            f"{one.oracle}: {one.sentence}"
            for one in verdict.findings
            if one.oracle is not Oracle.FENCE
            or not self._stored_twice.intersection(one.message_ids)
        ]
        return found

    def _tell_the_end(self) -> None:
        tell = self._world.ears.tell
        for subject, kept in self._world.shelf.kept.items():
            for sequence, one in enumerate(kept):
                tell(
                    Stored,
                    message_id=format_message_id(one.record.message_id),
                    subject=subject,
                    sequence=sequence,
                    offset=one.offset,
                    body_hash=hash_of(one.record),
                )
        read = self._databases.read
        labels = {label for (label,) in read("SELECT label FROM business")}
        for group, message_id, label in read("SELECT * FROM effect"):
            labels.add(label)
            tell(Effect, group=group, message_id=message_id)
        for label in self._world.labels:
            tell(Truth, transaction_id=label, is_committed=label in labels)

    def _judge_forced(self) -> list[str]:
        """What went by force before a group had got it is counted for this group (B12)."""
        effects = set(self._databases.read("SELECT consumer_group, message_id FROM effect"))
        faults: list[str] = []
        for group in self._plan.groups:
            state = self._broker.delivery.group(group.subject, group.name)
            lost = 0 if state is None else state.lost_count
            if not self._world.host.was_forced:
                if lost:
                    faults.append(f"B12: {group.name} has lost {lost} without force")
                continue
            got = effects if group.has_inbox else self._world.handled
            gone = self._records.get(group.subject, ())[: self._first(group)]
            for sequence, record in enumerate(gone):
                message_id = format_message_id(record.message_id)
                if self._is_done(group, sequence, message_id, got):
                    continue
                self._forced.add((group.name, message_id))
                lost -= 1
                last_given_ns = self._world.handouts.last_given_ns.get((group.name, message_id), 0)
                self._world.ears.tell(
                    DeadLetter,
                    group=group.name,
                    message_id=message_id,
                    reason="went by force",
                    last_given_ns=last_given_ns,
                )
            if lost < 0:
                faults.append(f"B12: {group.name} has lost {-lost} messages that nobody counted")
        return faults

    def _first(self, group: GroupPlan) -> int:
        """The first sequence of a group's subject that is still there."""
        queue = self._store.queue(group.subject)
        return 0 if queue is None else queue.first_sequence

    def _is_done(
        self, group: GroupPlan, sequence: int, message_id: str, got: Container[tuple[str, str]]
    ) -> bool:
        """Whether a group needs this message no more."""
        state = self._broker.delivery.group(group.subject, group.name)
        is_given = self._world.handouts.counts[group.name, message_id] > 0
        is_dead = state is not None and sequence in state.dead
        return (group.name, message_id) in got or is_dead or (group.kind is Kind.ONCE and is_given)

    def _judge_dead_letters(self) -> list[str]:
        """All were replayed when nothing was wrong any more; what had expired is dead again."""
        faults: list[str] = []
        for group in self._plan.groups:
            state = self._broker.delivery.group(group.subject, group.name)
            for sequence, letter in sorted(state.dead.items()) if state is not None else ():
                record = self._records[group.subject][sequence]
                message_id = format_message_id(record.message_id)
                self._world.ears.tell(
                    DeadLetter, group=group.name, message_id=message_id, reason=letter.reason
                )
                has_expired = letter.reason == EXPIRED and record.expires_at_ms is not None
                is_gone = self._world.host.was_forced and sequence < self._first(group)
                if has_expired or is_gone:  # what is gone cannot be replayed
                    continue
                faults.append(
                    f"C4: {message_id} is a dead letter of {group.name} for no reason: "
                    f"{letter.reason} after {letter.attempts} attempts"
                )
        return faults

    def _judge_replayed(self) -> list[str]:
        """Of ordered groups: others came past these, and in the end they came, too."""
        done = set(self._databases.read("SELECT consumer_group, message_id FROM effect"))
        faults: list[str] = []
        for group in self._of_kind(Kind.ORDERED):
            state = self._broker.delivery.group(group.subject, group.name)
            name = group.name
            sequences = [one for of, one in sorted(self._world.replayed) if of == name]
            for sequence in sequences:
                record = self._records[group.subject][sequence]
                message_id = format_message_id(record.message_id)
                self._world.ears.tell(
                    DeadLetter,
                    group=group.name,
                    message_id=message_id,
                    last_given_ns=self._world.handouts.last_given_ns.get((name, message_id), 0),
                )
                is_dead = state is not None and sequence in state.dead
                if not is_dead and (group.name, message_id) not in done | self._forced:
                    faults.append(f"replay: {message_id} did not come to {group.name} again")
        return faults

    def _judge_once(self) -> list[str]:
        """At most once: nobody saw a place twice, and each message was handed out or has expired.

        A message that is stored twice has two places; whether it may is a matter of DUPLOG.
        """
        faults: list[str] = []
        for group in self._of_kind(Kind.ONCE):
            seen = Counter(
                (event.message_id, event.sequence)
                for event in self._delivered()
                if event.group == group.name
            )
            faults += [
                f"at most once: {message_id} came {count} times to {group.name}"
                for (message_id, _), count in seen.items()
                if count > 1
            ]
            seen_ids = {message_id for message_id, _ in seen}
            for record in self._records.get(group.subject, ()):
                message_id = format_message_id(record.message_id)
                if message_id in seen_ids:
                    continue
                was_given = self._world.handouts.counts[group.name, message_id] > 0
                is_forced = (group.name, message_id) in self._forced
                if not was_given and not is_forced and record.expires_at_ms is None:
                    faults.append(f"at most once: {message_id} was kept from {group.name}")
                # Given, and lost on its way: that is what was asked for.
                self._world.ears.tell(DeadLetter, group=group.name, message_id=message_id)
        return faults

    def _judge_cancelled(self) -> list[str]:
        """What the broker called cancelled is nowhere; without its word it may be or not.

        Nor is it told of what came again after the ids of the dedupe window: that is another message.
        """
        stored = {
            format_message_id(record.message_id)
            for records in self._records.values()
            for record in records
        }
        wanted, anew = self._world.taken_back, self._world.host.remembered.anew
        for message_id in sorted(wanted.keys() - stored):
            self._world.ears.tell(Parked, message_id=message_id, reason="cancelled")
        return [
            f"D4: {message_id} was cancelled and came all the same"
            for message_id in sorted(wanted.keys() & stored)
            if wanted[message_id] and parse_message_id(message_id) not in anew
        ]

    def _judge_acks(self) -> list[str]:
        """Where no inbox tells of effects: what was acked was handled to the end before."""
        world = self._world
        seen = {group.name for group in self._plan.groups if group.is_seen_only}
        acked = {
            (event.group, event.message_id)
            for event in world.ears.events
            if isinstance(event, Acked) and event.group in seen
        }
        return [
            f"C2: {message_id} was acked for {group} and not handled"
            for group, message_id in sorted(acked - world.handled)
        ]

    def _judge_audits(self) -> list[str]:
        """After the last move to the beginning everything comes once more."""
        faults: list[str] = []
        since_ns = self._world.sought_at_ns
        for group in self._of_kind(Kind.AUDIT):
            again = {
                event.message_id
                for event in self._delivered()
                if event.group == group.name and event.at_ns > since_ns
            }
            dead = self._broker.delivery.group(group.subject, group.name)
            for sequence, record in enumerate(self._records.get(group.subject, ())):
                message_id = format_message_id(record.message_id)
                if sequence < self._world.sought.get(group.subject, 0):
                    continue
                if message_id not in again and (dead is None or sequence not in dead.dead):
                    faults.append(f"seek: {message_id} did not come again to {group.name}")
        return faults

    def _history(self) -> list[AnyEvent]:
        """What the kit's checker is told: it knows nothing of groups that are moved."""
        moved = {group.name for group in self._of_kind(Kind.AUDIT)}
        is_moved_early = Trouble.SEEK in self._plan.troubles
        return [
            event
            for event in self._world.ears.events
            if getattr(event, "group", None) not in moved
            or (not is_moved_early and event.at_ns < self._world.sought_at_ns)
            or isinstance(event, DeadLetter)
        ]

    def _groups(self) -> dict[str, Group]:
        is_moved = Trouble.SEEK in self._plan.troubles
        return {
            group.name: Group(
                subjects=frozenset({group.subject}),
                has_effects=group.has_inbox,
                is_ordered=group.kind is Kind.ORDERED,
            )
            for group in self._plan.groups
            if not (is_moved and group.kind is Kind.AUDIT)
        }

    def _promises(self) -> Promises:
        is_slow = Trouble.SLOW_DISK in self._plan.troubles
        window = window_ids(self._plan) if self._plan.has_retention else None
        if self._plan.has_retention and self._plan.has_delays:
            # A delayed message's place is that of its release: `Remembered` knows when it was sent.
            window = 0
        sync_ms = (SLOW_SYNC_US if is_slow else SYNC_US) // MS
        return Promises(
            dedupe_window_messages=window,
            doubled_requests=self._world.network.doubled,
            ordered_subjects=frozenset({ORDERS}) if self._plan.is_ordered else frozenset(),
            ack_durable_ms=_ACK_DURABLE_MS + 2 * sync_ms,
            lease_ms=LEASE_MS,
            drain_ms_max=120_000,
            recovery_ms_max=120_000,
        )

    def _of_kind(self, kind: Kind) -> list[GroupPlan]:
        return [group for group in self._plan.groups if group.kind is kind]

    def _delivered(self) -> list[Delivered]:
        return [event for event in self._world.ears.events if isinstance(event, Delivered)]
