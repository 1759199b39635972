"""The clients of the played world: producers, watchdogs and consumers, each a process with strands.

Each runs the product's own passes in loops as its threads do, and begins again after it died. What a
message is, how a transaction ends and what a handler does is drawn while the world goes on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.errors import QmqError
from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.producer import Producer
from qmq_client.request_headers import DEDUPE_HEADER
from qmq_client.retry import Backoff
from qmq_client.wire.message_id import (
    dedupe_message_id,
    format_message_id,
    parse_message_id,
)
from qmq_watchdog.databases import Database
from qmq_watchdog.options import DaemonOptions
from qmq_watchdog.sweep import Sweep, SweepOptions
from qmq_watchdog.sweep_job import SweepJob
from tests.kit.events import Accepted, Attempt, Commit, Rollback, Unknown
from tests.kit.history import body_hash
from tests.simulation.database import Slot
from tests.simulation.network import Line
from tests.simulation.plan import ORDERS
from tests.simulation.scheduler import MS, Died, PlayedClock, Process, Signal
from tests.simulation.world import World

TAKEOVER_MS: Final = 2_000
#: What cheap quartz is off by, and more.
DRIFT_PPM: Final = 300
_BACKOFF: Final = Backoff(first_ms=200, max_ms=3_000)
_AGAIN_US: Final = 2_000 * MS
_KEYS: Final = ("red", "red", "green", None)


class Machine(ABC):
    """Where one client runs: a slot at the database, a clock, and one life after the other."""

    def __init__(self, world: World, name: str, slot: Slot) -> None:
        self.world = world
        self.name = name
        self.slot = slot
        self.clock = PlayedClock(world.scheduler)
        self.process: Process = Process(world.scheduler, name)
        self.is_wanted = True
        #: May still begin a transaction of its own accord, in this life or a later one.
        self.is_sending = False
        #: Asked to end in order, which only some can.
        self.is_stopping = False
        #: Called when a life has ended.
        self.on_end: Callable[[], None] = lambda: None
        #: Ended in order: nothing of what it held may come again for its sake.
        self.has_stopped = False
        self._lives = 0

    def start(self) -> None:
        """Begin a life."""
        if not self.is_wanted:
            return
        self._lives += 1
        self.is_stopping = self.has_stopped = False
        self.process = process = Process(self.world.scheduler, f"{self.name}.{self._lives}")
        process.on_death = self._on_death
        ahead_ms, self.clock = self.clock.ahead_ms, PlayedClock(self.world.scheduler, process)
        self.clock.ahead_ms = ahead_ms
        self.clock.drift_ppm = self.world.scheduler.rng.randint(-DRIFT_PPM, DRIFT_PPM)
        self.engine = self.slot.take(process, self.world.played)
        self.line = Line(self.world.network, process, self.world.ears)
        process.spawn("main", self._main)

    def _main(self) -> None:
        """As the process's main thread: a failure to begin ends it, and it is begun again."""
        try:
            self.live()
        except (QmqError, sa.exc.SQLAlchemyError) as error:
            self.world.scheduler.note(f"{self.process.name} ended: {error!r:.200}")
            self.process.die()

    @abstractmethod
    def live(self) -> None:
        """What this client does; spawns strands or returns at its end."""

    def _on_death(self) -> None:
        world = self.world
        if not self.has_stopped:
            world.ears.fault("crash", self.process.name, "begin")
        self.on_end()
        self.slot.release()
        delay_us = world.scheduler.rng.randrange(_AGAIN_US)
        world.scheduler.after(delay_us, f"{self.name} starts", self.start)


class Shop(Machine):
    """A producer: an application with transactions, and the publisher beside it."""

    def __init__(self, world: World, name: str, slot: Slot) -> None:
        super().__init__(world, name, slot)
        self.is_sending = True
        #: Messages with dedupe keys that may be sent once more, whatever became of them.
        self._repeatable: list[Message] = []

    def live(self) -> None:
        """Send until there is nothing left to send."""
        world = self.world
        self._committed = Signal()
        self._producer = Producer(
            self.engine,
            self.line,
            options=ProducerOptions(
                background=False,
                takeover_ms=TAKEOVER_MS,
                order_by_key=world.plan.is_ordered,
                backoff=_BACKOFF,
                batch_messages=3,
            ),
            clock=self.clock,
        )
        self.process.spawn("publisher", lambda: publish(self, self._producer, self._committed))
        pause_us = world.plan.busy_ms * MS * world.plan.producers // world.plan.transactions
        while world.take_transaction():
            self.process.sleep(world.scheduler.rng.randrange(pause_us), "thinks")
            if world.plan.has_send_now and world.scheduler.rng.random() < 0.3:
                self._send_now()
            else:
                self._transaction()
            world.scheduler.give(self._committed)
        self.is_sending = False

    def _send_now(self) -> None:
        """A message without a transaction of the application: owed once the send has returned."""
        message = self.world.new_message(ORDERS, key=self.world.scheduler.rng.choice(_KEYS))
        attempt(self, message, "")
        with suppress(QmqError, sa.exc.SQLAlchemyError):
            message_id = self._producer.send_now(message)
            self.world.ears.tell(
                Accepted, self.process.name, message_id=message_id, subject=message.subject
            )

    def _transaction(self) -> None:
        world, rng = self.world, self.world.scheduler.rng
        label = world.new_label(self.name)
        ending = rng.choices(("commit", "rollback", "error"), weights=(8, 2, 1))[0]
        #: Through the ORM or through Core, where nobody tells the product that a commit was done.
        open_scope = Session if rng.random() < 0.7 else sa.Engine.connect
        try:
            with open_scope(self.engine) as scope:
                self._write(scope, label)
                if rng.random() < 0.2:
                    self._savepoint(scope, f"{label}/s")
                if rng.random() < 0.3:
                    self.process.sleep(rng.randrange(300 * MS), "works in its transaction")
                if ending == "commit":
                    self._commit(scope, label)
                    return
                if ending == "error":
                    raise ValueError("the application's own")
        except (sa.exc.SQLAlchemyError, ValueError):
            pass
        world.ears.tell(Rollback, self.process.name, transaction_id=label)

    def _commit(self, scope: Session | sa.Connection, label: str) -> None:
        ears = self.world.ears
        try:
            scope.commit()
        except sa.exc.SQLAlchemyError:
            ears.tell(Unknown, self.process.name, transaction_id=label)
            # Or SQLAlchemy puts a connection of Core back into its pool with the transaction open.
            scope.rollback()
            return
        except Died:
            ears.tell(Unknown, self.process.name, transaction_id=label)
            raise
        ears.tell(Commit, self.process.name, transaction_id=label)

    def _savepoint(self, scope: Session | sa.Connection, label: str) -> None:
        with scope.begin_nested() as savepoint:
            self._write(scope, label)
            if self.world.scheduler.rng.random() < 0.5:
                savepoint.rollback()

    def _write(self, scope: Session | sa.Connection, label: str) -> None:
        rng = self.world.scheduler.rng
        scope.execute(sa.text("INSERT INTO business VALUES (:label)"), {"label": label})
        for message in [self._next_message() for _ in range(rng.randint(1, 3))]:
            attempt(self, message, label)
            self._producer.send(message, session=scope)
            if message.delay is not None and message.message_id and rng.random() < 0.4:
                self._regret(message)

    def _next_message(self) -> Message:
        """A new one or, where messages have dedupe keys, perhaps one that was sent before."""
        world, rng = self.world, self.world.scheduler.rng
        if not world.plan.has_repeats or rng.random() < 0.5:
            return world.new_message(ORDERS, key=rng.choice(_KEYS))
        if self._repeatable and rng.random() < 0.5:
            return self._repeatable.pop()
        message = world.new_message(ORDERS, is_repeatable=True)
        self._repeatable.append(message)
        return message

    def _regret(self, message: Message) -> None:
        """Some time later somebody wants a delayed message back."""
        world, message_id = self.world, message.message_id
        assert message_id is not None

        def take_back() -> None:
            self.process.sleep(world.scheduler.rng.randrange(4_000 * MS), "changes its mind")
            world.taken_back.setdefault(message_id, False)
            world.rows.wanted_back[parse_message_id(message_id)] = self.process
            with suppress(QmqError, sa.exc.SQLAlchemyError):
                if self._producer.cancel_now(message_id):
                    world.taken_back[message_id] = True

        self.process.spawn("regrets", take_back)


def publish(machine: Machine, producer: Producer, committed: Signal) -> None:
    """The publisher's thread."""
    publisher = producer._publisher
    while True:
        done = publisher.step(machine.clock.monotonic_s())
        if len(publisher.queue) >= done.wake_at_messages:
            machine.process.sleep(0, "publishes on")
            continue
        wait_us = 1_000 * MS if done.wait_s is None else round(done.wait_s * 1_000_000)
        machine.process.wait(committed, max(1, wait_us), "publisher waits")


def attempt(machine: Machine, message: Message, label: str) -> None:
    """Note that a message is about to be sent in this transaction."""
    headers = dict(message.headers)
    if message.dedupe_key is not None:
        headers[DEDUPE_HEADER] = message.dedupe_key
    machine.world.ears.tell(
        Attempt,
        machine.process.name,
        message_id=id_of(message),
        subject=message.subject,
        body_hash=body_hash(message.body, headers),
        transaction_id=label,
        key=message.key or "",
    )


def id_of(message: Message) -> str:
    """The message's own id, or the one that its dedupe key makes."""
    if message.dedupe_key is None:
        assert message.message_id is not None
        return message.message_id
    return format_message_id(dedupe_message_id(message.subject, message.dedupe_key))


class Watch(Machine):
    """A watchdog with one database."""

    def live(self) -> None:
        """Sweep for ever."""
        draw = self.world.scheduler.rng.random
        database = Database(name="world", store=OutboxStore(self.engine), engine=self.engine)
        sweep = Sweep(
            database,
            self.line,
            SweepOptions(batch_rows=4, lease_ms=4_000, backoff=_BACKOFF, seconds_max=60.0),
            clock=self.clock,
            random=draw,
            executor=AtOnce,
        )
        options = DaemonOptions(poll_s=1.0, idle_after_s=5.0, idle_poll_s=2.0, outage_s_max=2.0)
        job = SweepJob(sweep, options, draw, clock=self.clock)
        while True:
            job.step(lambda: False)
            self.process.sleep(max(1, round(job.delay_s * 1_000_000)), "waits for its next sweep")


class AtOnce(Executor):
    """An executor without a thread: what is submitted is done before `submit` returns."""

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        """See `concurrent.futures.Executor`."""
        future: Future[Any] = Future()
        try:
            future.set_result(work(*given, **named))
        except Exception as error:
            future.set_exception(error)
        return future
