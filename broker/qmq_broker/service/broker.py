"""The broker without its network face: intake, writer, delivery and queries over one store.

Owned by one event loop; `post` runs a function in its thread. Four threads work
outside the loop: the writer, the sync of the action log, the indexer, and the release of delayed
messages. One more waits for the disk while delayed messages are copied or old segments are removed.

Life cycle: `start`, then calls from the loop thread, then `drain` and `stop`. A poisoned broker
stops without a clean mark, so that the next start verifies what is on the disk.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from qmq_broker.options import StoreOptions
from qmq_broker.service.delay.delayed import Delayed
from qmq_broker.service.delivery.changes import Changes
from qmq_broker.service.delivery.delivery import Delivery
from qmq_broker.service.housekeeping import ActionSync, Housekeeping
from qmq_broker.service.indexer import Indexer
from qmq_broker.service.intake import Intake
from qmq_broker.service.keeping import Keeping
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.long_retries import LongRetryScheduler, SteadyTime
from qmq_broker.service.metrics import Metrics
from qmq_broker.service.query import Query
from qmq_broker.service.room import Room
from qmq_broker.service.serving import Serving, ServingState
from qmq_broker.service.subject_removal import SubjectRemoval
from qmq_broker.service.writer import CommitWriter, OnDone
from qmq_broker.storage.files.background import in_a_thread
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.store import Placed, Store
from qmq_client.clock import Clock
from qmq_client.wire.backoff import ExponentialBackoff
from qmq_client.wire.frame import MessageFrame
from qmq_client.wire.limits import DEFAULT_LIMITS, Limits
from qmq_client.wire.requests import SendAnswer, SubjectPlace

DURABLE = "durable"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """Settings of the service."""

    wire: Limits = DEFAULT_LIMITS
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    backoff: ExponentialBackoff = field(default_factory=ExponentialBackoff)
    store: StoreOptions = field(default_factory=StoreOptions)
    #: Whether only pulls and settlements are served.
    is_read_only: bool = False


class Broker:
    """Everything behind the face; see the module docstring for threads and life cycle."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        settings: BrokerSettings,
        *,
        post: Callable[[Callable[[], None]], object],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.settings = settings
        self.serving = _serving(settings)
        self.time = SteadyTime(clock)
        self.metrics = Metrics()
        self.delivery = Delivery(
            store,
            settings.limits,
            draw=draw,
            on_poisoned=self._on_poisoned,
            backoff=settings.backoff,
        )
        self.changes = Changes(store, self.delivery, settings.limits)
        self.intake = _intake(store, self.serving, settings, self.time, self.delivery)
        self.query = Query(store, self.delivery, self.intake)
        self.writer = CommitWriter(
            store,
            clock,
            settings.limits,
            post=post,
            on_visible=self.delivery.on_visible,
            on_poisoned=self._on_poisoned,
            metrics=self.metrics,
        )
        self.subject_removal = SubjectRemoval(store, self.writer, self.delivery, self.intake)
        self.room = Room(self.delivery, self.intake, self.writer, settings.limits)
        self._store, self._post = store, post
        self._action_sync = ActionSync(
            store,
            self.delivery.journal,
            clock,
            interval_ms=settings.limits.action_sync_ms,
            sync_s=self.metrics.action_sync_s,
            post=post,
            on_poisoned=self._on_poisoned,
        )
        self._indexer = Indexer(store, clock)
        self.delayed = Delayed(store, self.writer, clock, settings.limits, post=post)
        self.keeping = Keeping(store, self.writer)
        self.long_retries = LongRetryScheduler(
            store, self.delivery, self.writer, self.time, settings.limits, self.delayed
        )
        self._housekeeping = _housekeeping(
            store, self.delivery, self.writer, self._action_sync, self.keeping, settings
        )
        self._threads = _threads(self.writer, self._action_sync, self._indexer, self.delayed)
        #: Called once, in the loop thread, when the broker can no longer serve.
        self.on_end: Callable[[], None] = lambda: None
        #: Called in the loop thread when the broker is asked to stop in an orderly way.
        self.on_stop: Callable[[], None] = lambda: None

    def start(self) -> int:
        """Rebuild the groups and start the threads; returns how many actions were replayed."""
        replayed = self.delivery.start(self.time.now_ms())
        self.delayed.releaser.begin()
        self._store.work_in_background(in_a_thread)
        for thread in self._threads:
            thread.start()
        return replayed

    def step(self) -> None:
        """One bounded pass of all time-dependent work.

        Call it repeatedly, in the loop thread.
        """
        now_ms = self.time.now_ms()
        self.long_retries.step(now_ms)
        self.delivery.step(now_ms)
        self._housekeeping.step(now_ms)

    @property
    def disk(self) -> Disk:
        """The store's files, for readers outside the store."""
        return self._store.disk

    @property
    def store_id(self) -> str:
        """Identifies the store, in 32 hex digits."""
        return self._store.store_id.hex()

    @property
    def durable_offsets(self) -> tuple[int, int]:
        """The offsets up to which the commit log and the action log survive a power cut."""
        return self._store.durable_offset, self._store.actions.log.durable_offset

    def sync_actions(self) -> None:
        """Make all actions so far durable. Blocks; call from any thread."""
        try:
            self._store.actions.sync()
        except Exception as error:
            reason = f"action log sync: {type(error).__name__}: {error}"
            self._post(lambda: self._on_poisoned(reason))
            raise

    def send(
        self,
        data: bytes,
        on_done: OnDone,
        may_send: Callable[[str], None] | None = None,
        *,
        owner: str = "",
    ) -> MessageFrame:
        """Check a request and queue it for its commit; raises if it is refused.

        `on_done` is called in the loop thread when the request is durable, or failed. `may_send` is
        called with each subject, and raises where the sender may not send. New subjects take the
        share of the token named `owner`.
        """
        frame = self.intake.check(data, may_send, owner=owner)
        self.writer.submit(frame, on_done)
        self.intake.note_accepted(frame, owner)
        return frame

    def set_read_only(self, is_read_only: bool, reason: str) -> bool:
        """Stop or resume accepting messages; returns whether that was a change.

        Holds until the next start, which follows its own options. Raises `UnavailableError` while
        the broker is stopping.
        """
        wanted = Serving.READ_ONLY if is_read_only else Serving.SERVING
        if self.serving.state is wanted:
            return False
        self.serving.check_delivers()
        if self.serving.is_stopping:
            raise self.serving.refusal("its state cannot be changed")
        return self.serving.become(wanted, reason if is_read_only else "")

    def ask_to_stop(self, reason: str) -> int:
        """Drain, then let the process end in an orderly way; returns how many pulls waited."""
        woken = self.drain(reason)
        self.on_stop()
        return woken

    def drain(self, reason: str) -> int:
        """Accept no more messages and answer all waiting pulls; returns how many there were."""
        self.serving.become(Serving.DRAINING, reason)
        return self.delivery.waiting.wake_all()

    def stop(self, deadline_s: float) -> bool:
        """End the threads and close the store; returns whether that was clean.

        Blocks up to `deadline_s` for each thread. Do not call it in the loop thread, which must
        answer requests that the writer still commits.
        """
        self.delayed.releaser.stop()
        self.writer.stop()
        self._action_sync.stop()
        self._indexer.stop()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(deadline_s)
        is_clean = self.serving.state is not Serving.POISONED and not any(
            thread.is_alive() for thread in self._threads
        )
        if is_clean:
            self._store.close()
        return is_clean

    def _on_poisoned(self, reason: str) -> None:
        if self.serving.become(Serving.POISONED, reason):
            self.delivery.waiting.wake_all()
            self.on_end()


def _serving(settings: BrokerSettings) -> ServingState:
    if settings.is_read_only:
        return ServingState(Serving.READ_ONLY, "asked for at start")
    return ServingState()


def _intake(
    store: Store,
    serving: ServingState,
    settings: BrokerSettings,
    time: SteadyTime,
    delivery: Delivery,
) -> Intake:
    return Intake(
        store,
        serving,
        wire=settings.wire,
        limits=settings.limits,
        reserve_bytes=settings.store.reserve_bytes,
        latest_ms=time.latest_ms,
        shares=delivery.subject_shares,
    )


def _housekeeping(
    store: Store,
    delivery: Delivery,
    writer: CommitWriter,
    action_sync: ActionSync,
    keeping: Keeping,
    settings: BrokerSettings,
) -> Housekeeping:
    return Housekeeping(
        store,
        delivery,
        writer,
        action_sync,
        keeping,
        options=settings.store,
        limits=settings.limits,
    )


def _threads(
    writer: CommitWriter, sync: ActionSync, indexer: Indexer, delayed: Delayed
) -> list[threading.Thread]:
    return [
        threading.Thread(target=writer.run, name="qmq-writer", daemon=True),
        threading.Thread(target=sync.run, name="qmq-action-sync", daemon=True),
        threading.Thread(target=indexer.run, name="qmq-indexer", daemon=True),
        threading.Thread(target=delayed.releaser.run, name="qmq-delay", daemon=True),
    ]


def send_answer(
    frame: MessageFrame, placed: Placed, message_ids: tuple[str, ...] = ()
) -> SendAnswer:
    """The answer to the sender of a durable request."""
    return SendAnswer(
        frame_crc=frame.header.body_crc,
        count=frame.header.record_count,
        duplicates=placed.duplicates,
        physical_offset=placed.physical_offset,
        stored_at_ms=placed.stored_at_ms,
        durability=DURABLE,
        places=tuple(
            SubjectPlace(subject=p.subject, first_sequence=p.first_sequence, count=p.count)
            for p in placed.places
        ),
        message_ids=message_ids,
    )
