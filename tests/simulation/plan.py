"""What a seed makes of a world: its people, its faults and its length, all drawn before it begins.

Each seed has only some of the kinds of faults, and those more often: a world where everything goes wrong
all the time does little, and finds little.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

ORDERS: Final = "orders"
SHIPPED: Final = "shipped"


class Kind(StrEnum):
    """How a group consumes."""

    #: Effects in the transaction of the inbox.
    INBOX = "inbox"
    #: The same, and each effect sends a message on in that transaction.
    RELAY = "relay"
    #: The same for lists of messages, some of which the handler gives back or rejects by hand.
    BATCH = "batch"
    #: By key, with an inbox.
    ORDERED = "ordered"
    #: Acked before they are given out.
    ONCE = "once"
    #: No inbox: whatever comes is seen, and moved back to the beginning at the end.
    AUDIT = "audit"
    #: The handler is asynchronous, and cancelled when it takes too long.
    ASYNC = "async"
    #: Every consumer gets every message, and comes back under its name.
    CROWD = "crowd"


class Trouble(StrEnum):
    """Kinds of faults."""

    POWER_CUT = "power cut of the broker"
    BROKER_KILL = "kill of the broker"
    BROKER_RESTART = "restart of the broker"
    DISK_CALL = "death of the broker at a call of its disk"
    HAND_OUT_CUT = "power cut of the broker right after a hand-out"
    SLOW_DISK = "slow syncs of the broker's disk"
    BAD_DISK = "failing syncs of the broker's disk"
    FULL_DISK = "no room on the broker's disk"
    READ_ONLY = "a broker that takes no messages"
    PRODUCER_CRASH = "crash of a producer"
    CONSUMER_CRASH = "crash of a consumer"
    CONSUMER_STOP = "stop of a consumer in order"
    WATCHDOG_CRASH = "crash of a watchdog"
    LOST_REQUESTS = "lost requests"
    LOST_ANSWERS = "lost answers"
    DOUBLED = "requests that arrive twice"
    SLOW = "late requests and answers"
    PARTITION = "a client that is cut off"
    DATABASE = "a database that is away"
    COMMITS = "errors of COMMIT, whether it was done or not"
    CLOCKS = "clocks that are set"
    PAUSE = "a paused group"
    SEEK = "a group that is moved"
    REPLAY = "dead letters that are replayed"
    FORCE = "lives of the broker in which retention waits for nobody"
    REMOVAL = "an archive that is not waited for any more"


#: Only where there is something to be retained, and somebody who is waited for.
_OF_SOME_WORLDS: Final = (Trouble.FORCE, Trouble.REMOVAL)


_GROUPS: Final = {
    Kind.INBOX: "billing",
    Kind.RELAY: "packing",
    Kind.BATCH: "shelving",
    Kind.ORDERED: "ledger",
    Kind.ONCE: "screen",
    Kind.AUDIT: "audit",
    Kind.ASYNC: "mail",
    Kind.CROWD: "board",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One consumer group."""

    #: As listings name it: with the consumer behind it, when it is a broadcast's.
    name: str
    kind: Kind
    subject: str = ORDERS
    consumers: int = 1
    max_attempts: int = 16

    @property
    def is_seen_only(self) -> bool:
        """Whether it acks what it has handled, and nothing in a database tells of that."""
        return self.kind in (Kind.AUDIT, Kind.ASYNC, Kind.CROWD)

    @property
    def has_inbox(self) -> bool:
        """Whether its effects are in a database."""
        return self.kind in (Kind.INBOX, Kind.RELAY, Kind.BATCH, Kind.ORDERED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One world."""

    seed: int
    producers: int
    watchdogs: int
    groups: tuple[GroupPlan, ...]
    #: Transactions of all producers together.
    transactions: int
    is_ordered: bool
    troubles: tuple[Trouble, ...]
    #: Trouble begins on average after so long.
    trouble_every_ms: int
    #: Messages whose number has this rest are never handled; None for no such ones.
    poison_rest: int | None
    #: Whether those end the process of their consumer.
    is_poison_deadly: bool
    has_delays: bool
    has_expiry: bool
    #: Whether the broker gives up what all groups have got, and keeps a few messages only.
    has_retention: bool
    #: Whether handlers give messages back for longer than the broker holds them in place.
    has_long_waits: bool
    #: Whether applications send messages again, under the same dedupe key.
    has_repeats: bool
    #: Whether applications send messages outside their transactions.
    has_send_now: bool
    #: Whether somebody archives the broker's logs, whom retention waits for.
    has_archive: bool
    busy_ms: int


#: Every so many messages one is poison, where there is some.
POISON_EVERY: Final = 11
#: Every so many are rejected where a handler may.
UNWANTED_EVERY: Final = 7


def plan_of(seed: int) -> Plan:
    """The world of a seed."""
    rng = random.Random(f"plan {seed}")
    anywhere = [one for one in Trouble if one not in _OF_SOME_WORLDS]
    is_ordered = rng.random() < 0.4
    has_poison = rng.random() < 0.3
    has_retention = rng.random() < 0.3
    plan = Plan(
        seed=seed,
        producers=rng.randint(1, 2),
        watchdogs=rng.randint(1, 2),
        groups=tuple(_groups(rng, is_ordered=is_ordered, has_poison=has_poison)),
        transactions=rng.randint(6, 12),
        is_ordered=is_ordered,
        troubles=tuple(rng.sample(anywhere, rng.randint(2, 6))),
        trouble_every_ms=rng.choice((400, 900, 2_000)),
        poison_rest=rng.randrange(POISON_EVERY) if has_poison else None,
        has_delays=rng.random() < 0.4,
        has_expiry=rng.random() < 0.25,
        has_retention=has_retention,
        has_long_waits=rng.random() < 0.25,
        # A broker that knows few ids may store a message again that is sent again much later.
        has_repeats=rng.random() < 0.4 and not has_retention,
        has_send_now=rng.random() < 0.3,
        busy_ms=rng.randint(4_000, 10_000),
        is_poison_deadly=has_poison and rng.random() < 0.4,
        has_archive=rng.random() < 0.4,
    )
    more: list[Trouble] = []
    if rng.random() < 0.4 and (plan.has_retention or plan.has_archive):
        more.append(Trouble.FORCE)
    if rng.random() < 0.4 and plan.has_archive:
        more.append(Trouble.REMOVAL)
    return replace(plan, troubles=(*plan.troubles, *more))


def _groups(rng: random.Random, *, is_ordered: bool, has_poison: bool) -> list[GroupPlan]:
    kinds: list[Kind] = rng.sample(
        [kind for kind in Kind if kind is not Kind.ORDERED], rng.randint(1, 2)
    )
    if is_ordered:
        kinds.append(Kind.ORDERED)
    groups: list[GroupPlan] = []
    for kind in kinds:
        name, consumers = _GROUPS[kind], rng.randint(1, 2)
        # A message that ends its process takes a lease for each attempt, one such message at a time.
        max_attempts = rng.randint(3, 5) if has_poison else 16
        names = [name]
        if kind is Kind.CROWD:
            names, consumers = [f"{name}@{name}-{one}" for one in range(consumers)], 1
        groups += [
            GroupPlan(name=one, kind=kind, consumers=consumers, max_attempts=max_attempts)
            for one in names
        ]
    groups += [
        replace(group, name="post", kind=Kind.INBOX, subject=SHIPPED, consumers=1)
        for group in groups
        if group.kind is Kind.RELAY
    ]
    return groups
