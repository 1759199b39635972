"""Consumers of the played world: the product's `Member` with its three passes, each a strand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from qmq_client.consumer import Delivery, consumer
from qmq_client.consumer.handler import collect_handlers
from qmq_client.consumer.identity import Identity
from qmq_client.consumer.member import Lines, Member, Pass
from qmq_client.consumer.outage import InboxOutages, Outage
from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.producer import Producer
from qmq_client.retry import Retry
from tests.simulation.database import Slot
from tests.simulation.loop import PlayedCalls
from tests.simulation.people import TAKEOVER_MS, Machine, attempt, publish
from tests.simulation.plan import SHIPPED, GroupPlan, Kind
from tests.simulation.scheduler import MS, Signal
from tests.simulation.world import World

LEASE_MS: Final = 3_000
_WAIT_MS: Final = 1_000
#: For an asynchronous handler, which is cancelled then.
_TIMEOUT_MS: Final = 2_000
_US_PER_S: Final = 1_000_000
_LOOK_US: Final = 400 * MS
_SETTLE_AFTER_US: Final = 20 * MS
_EFFECT: Final = sa.text("INSERT INTO effect VALUES (:consumer_group, :message_id, :label)")


class Worker(Machine):
    """One consumer of one group."""

    def __init__(self, world: World, name: str, slot: Slot, group: GroupPlan) -> None:
        super().__init__(world, name, slot)
        self._group = group
        self.member: Member | None = None

    def live(self) -> None:
        """Begin the three strands of the member."""
        self.member = None
        (handler,) = collect_handlers(self._make_handler())
        self._calls = PlayedCalls(self.world.scheduler, self.process)
        self.on_end = self._calls.loop.end
        is_named = self._group.kind is Kind.CROWD
        member = Member(
            handler,
            Lines(pulling=self.line, settling=self.line),
            identity=Identity(
                self._group.name.partition("@")[2] if is_named else self.process.name
            ),
            clock=self.clock,
            async_calls=self._calls,
            outage=Outage(),
            inbox_outages=InboxOutages(self.clock),
            on_exit=_not_here,
        )
        self._committed = Signal()
        if self._group.kind is Kind.RELAY:
            options = ProducerOptions(background=False, takeover_ms=TAKEOVER_MS)
            self._producer = Producer(self.engine, self.line, options=options, clock=self.clock)
            self.process.spawn("publisher", lambda: publish(self, self._producer, self._committed))
        member.check()
        self._changed = Signal()
        self.member = member
        self._busy_strands = 2
        self.process.spawn("pulls", lambda: self._loop(self._pull))
        self.process.spawn("works", lambda: self._loop(self._work))
        self.process.spawn("settles", lambda: self._loop(self._settle))

    def stop(self) -> None:
        """End in order, as `Consumers.stop` does: nothing new, what was begun to its end."""
        if not self.is_stopping and not self.process.is_dead and self.member is not None:
            self.is_stopping = True
            self.member.stop()
            self.world.scheduler.give(self._changed)

    def _loop(self, step: Callable[[Member], Pass | None]) -> None:
        """One thread of `Consumers`: a pass, then its pause, or a wait for something to do."""
        member, is_settling = self.member, step == self._settle
        assert member is not None
        while is_settling or not self.is_stopping:
            if is_settling and self._is_done(member):
                self.has_stopped = True
                self.process.die()
            done = step(member)
            if done is None:
                self.process.wait(self._changed, _LOOK_US, "has nothing to do")
                continue
            self.world.scheduler.give(self._changed)
            if done.pause_s:
                self.process.sleep(round(done.pause_s * 1_000_000), "pauses")
        self._busy_strands -= 1
        self.world.scheduler.give(self._changed)

    def _is_done(self, member: Member) -> bool:
        return self.is_stopping and not self._busy_strands and not len(member.ledger)

    def _pull(self, member: Member) -> Pass | None:
        return member.pull_once() if member.prefetch.room(is_blocking=False) else None

    def _work(self, member: Member) -> Pass | None:
        done = member.work_once(is_blocking=False)
        return done if done.count else None

    def _settle(self, member: Member) -> Pass | None:
        if len(member.ledger) and self._group.kind is not Kind.ORDERED:
            self.process.sleep(_SETTLE_AFTER_US, "waits for company")
        done = member.settle_once()
        return done if done.count or done.has_failed else None

    def _make_handler(self) -> Callable[..., Any]:
        group = self._group
        mark = consumer(group.subject, group=group.name.partition("@")[0], **self._settings())
        if group.kind is Kind.ASYNC:

            async def look_up(message: Message) -> None:
                await asyncio.sleep(self._begin(message, None) / _US_PER_S)
                self._end(message)

            return mark(look_up)
        if group.kind is Kind.BATCH:

            def handle_all(deliveries: list[Delivery], session: Session) -> None:
                self._handle_all(deliveries, session)

            return mark(handle_all)
        if group.has_inbox:

            def handle(message: Message, session: Session) -> None:
                self._handle(message, session)

            return mark(handle)

        def look(message: Message) -> None:
            self._handle(message, None)

        return mark(look)

    def _settings(self) -> dict[str, Any]:
        group = self._group
        settings: dict[str, Any] = {
            "lease_ms": LEASE_MS,
            "wait_ms": _WAIT_MS,
            "max_attempts": group.max_attempts,
        }
        if group.kind is Kind.ORDERED:
            settings["ordered"] = True
        if group.kind is Kind.ONCE:
            settings["at_most_once"] = True
        if group.kind is Kind.CROWD:
            settings["broadcast"] = "named"
        if group.kind is Kind.ASYNC:
            settings["timeout_ms"] = _TIMEOUT_MS
        if group.kind is Kind.BATCH:
            settings |= {"batch_size": 3, "max_wait_ms": 200}
        if group.has_inbox:
            settings["inbox"] = sessionmaker(self.engine)
        return settings

    def _handle(self, message: Message, session: Session | None) -> None:
        self.process.sleep(self._begin(message, session), "handles")
        self._end(message)

    def _handle_all(self, deliveries: list[Delivery], session: Session) -> None:
        """Each by itself: some are given back or rejected by hand, and the others committed."""
        rng = self.world.scheduler.rng
        for delivery in deliveries:
            assert delivery.message.message_id is not None
            if self.world.is_unwanted(delivery.message.message_id):
                delivery.reject("unwanted")
            elif rng.random() < 0.1 and not self.world.is_cured:
                delivery.nack(after=self._wait_s())
            else:
                self._handle(delivery.message, session)

    def _wait_s(self) -> float:
        """How much later a message is to come again."""
        longest_s = 6.0 if self.world.plan.has_long_waits else 1.0
        return self.world.scheduler.rng.random() * longest_s

    def _begin(self, message: Message, session: Session | None) -> int:
        """The first half of handling; returns how long it takes."""
        world, rng = self.world, self.world.scheduler.rng
        assert message.message_id is not None
        if rng.random() < 0.05 and not world.is_cured:
            raise Retry(after=self._wait_s())
        if session is not None:
            label = world.new_label(self._group.name)
            about = {
                "consumer_group": self._group.name,
                "message_id": message.message_id,
                "label": label,
            }
            session.execute(_EFFECT, about)
            if self._group.kind is Kind.RELAY:
                onward = world.new_message(SHIPPED)
                attempt(self, onward, label)
                self._producer.send(onward, session=session)
        # Sometimes longer than the lease, which the member prolongs meanwhile.
        longest_ms = 2 * LEASE_MS if rng.random() > 0.97 else 30
        return rng.randrange(longest_ms * MS)

    def _end(self, message: Message) -> None:
        world = self.world
        assert message.message_id is not None
        if world.is_poison(message.message_id):
            if world.plan.is_poison_deadly:
                self.process.die()
            raise ValueError("poison")
        if world.scheduler.rng.random() < 0.07 and not world.is_cured:
            raise ValueError("not this time")
        world.handled.add((self._group.name, message.message_id))
        world.scheduler.give(self._committed)


def _not_here(error: BaseException) -> None:
    raise AssertionError("no handler of these ends its process") from error
