"""D3 for long retries, in every crash state: copies, their actions, releases, redeliveries.

A life nacks messages for hours and lets segments go. Each state that a power cut may leave is opened,
all time passes, and the group must get every message that it had not acked durably, once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from qmq_broker.service.broker import Broker, BrokerSettings
from qmq_broker.service.delivery.delivery import HandOut
from qmq_broker.service.delivery.registry import Group
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.long_retries import LongRetryScheduler
from qmq_broker.storage.store import Store
from qmq_client.group.long_retries import LongRetries
from qmq_client.group.redelivery import Redelivery
from qmq_client.wire.errors import QmqError
from qmq_client.wire.frame import build_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import Record, decode_record, encode_record
from qmq_client.wire.requests import Nack, PullRequest, Settlement, SettleRequest
from tests.crash.enumeration import CHECKED, SEED, Census, quietly
from tests.crash.image import Image
from tests.crash.recording_disk import PassingDisk, RecordingDisk, images
from tests.crash.world import RETAINING, BrokenPromiseError
from tests.kit.clock import FakeClock

HOUR_MS = 3_600_000
SUBJECT, GROUP, CONSUMER = "orders", "billing", "one"
OPTIONS = replace(RETAINING, bucket_grace_ms=0, snapshot_bytes=600, retain_ms=HOUR_MS)
LIMITS = ServiceLimits()
#: Everything in these lives has come back by then.
END_MS = FakeClock().wall_ms + 400 * HOUR_MS


class Served:
    """A broker over a store, without threads."""

    def __init__(self, store: Store, clock: FakeClock) -> None:
        self.store = store
        self.posted: list[Callable[[], None]] = []
        settings = BrokerSettings(limits=LIMITS, store=OPTIONS)
        self.clock = clock
        self.broker = Broker(store, clock, settings, post=self.posted.append, draw=lambda: 1.0)
        self.broker.delivery.start(self.broker.time.now_ms())
        self.broker.delayed.releaser.begin()

    def turn(self) -> None:
        """What is done by time, until nothing is left to do."""
        for _ in range(5):
            self.broker.step()
            self.broker.delayed.releaser.step()
            self.commit()
            self.broker._action_sync.step()
            self.clock.pass_ms(1_000)

    def commit(self) -> None:
        self._run()
        self.broker.writer.step()
        self._run()

    def send(self, body: bytes, message_id: bytes) -> None:
        record = Record(message_id=message_id, subject=SUBJECT, body=body, born_at_ms=1)
        self.broker.send(build_message_frame({SUBJECT: [encode_record(record)]}), lambda _: None)
        self.commit()

    def pull(self) -> HandOut | None:
        request = PullRequest(subject=SUBJECT, group=GROUP, consumer=CONSUMER)
        return self.broker.delivery.pull(request, self.broker.time.now_ms())

    def settle(self, given: HandOut, delay_ms: int | None) -> None:
        """Give all of it back for so long, or ack it."""
        part = given.head.first_pull_sequence, given.head.first_pull_sequence + len(given.records)
        nacks = () if delay_ms is None else (Nack(range=part, delay_ms=delay_ms),)
        acks = (part,) if delay_ms is None else ()
        settlement = Settlement(token=given.head.token, nacks=nacks, acks=acks)
        request = SettleRequest(
            subject=SUBJECT, group=GROUP, consumer=CONSUMER, settlements=(settlement,)
        )
        self.broker.delivery.settle(request, self.broker.time.now_ms())

    def _run(self) -> None:
        posted, self.posted[:] = list(self.posted), []
        for call in posted:
            call()


class LongRetryLife:
    """What one group does with its messages, and when that was durable."""

    def __init__(self) -> None:
        self.disk = RecordingDisk()
        self.clock = FakeClock()
        self.ids = MessageIds(7)
        #: Body → operations when it was accepted, and when an ack of it began and was durable.
        self.accepted: dict[bytes, int] = {}
        self.acking: dict[bytes, int] = {}
        self.open()

    def open(self) -> None:
        self.served = Served(Store.open(self.disk, self.clock, OPTIONS), self.clock)

    def kill(self) -> None:
        self.disk.unlock()
        self.open()

    def send(self, *bodies: bytes) -> None:
        for body in bodies:
            self.served.send(body, self.ids.next_id())
            self.accepted[body] = len(self.disk.operations)

    def give_back(self, hours: float | None) -> list[bytes]:
        """Pull, and give all of it back for so long, or ack it."""
        given = self.served.pull()
        if given is None:
            return []
        bodies = [decode_record(SUBJECT, record).body for record in given.records]
        if hours is None:
            for body in bodies:
                self.acking.setdefault(body, len(self.disk.operations))
        self.served.settle(given, None if hours is None else round(hours * HOUR_MS))
        self.served.turn()
        return bodies

    def pass_hours(self, hours: float) -> None:
        self.clock.pass_ms(round(hours * HOUR_MS))
        self.served.turn()


Scenario = Callable[[LongRetryLife], None]


def goes_and_comes(life: LongRetryLife) -> None:
    """Two long retries, then acked."""
    life.send(b"a", b"b")
    life.give_back(20)
    life.pass_hours(21)
    life.give_back(30)
    life.pass_hours(31)
    assert life.give_back(None) == [b"a", b"b"]


def segments_go(life: LongRetryLife) -> None:
    """The originals go during long retries, and copies go when they are acked."""
    life.send(b"far")
    life.give_back(50)
    for number in range(5):
        life.send(f"{number}".encode().ljust(500, b"."))
        life.give_back(None)
        life.pass_hours(5)
    assert life.served.store.first_offset > 0
    life.pass_hours(30)
    assert life.give_back(None) == [b"far"]
    life.send(b"last".ljust(700, b"."))
    life.pass_hours(5)


def kills(life: LongRetryLife) -> None:
    """Killed with the power on in every phase."""
    life.send(b"a")
    given = life.served.pull()
    assert given is not None
    life.served.settle(given, 20 * HOUR_MS)
    life.served.broker.step()
    life.served.broker.writer.step()
    life.kill()
    life.served.turn()
    life.kill()
    life.clock.pass_ms(21 * HOUR_MS)
    life.served.broker.delayed.releaser.step()
    life.served.commit()
    life.kill()
    life.served.turn()
    life.kill()
    assert life.give_back(None) == [b"a"]


SCENARIOS: tuple[Scenario, ...] = (goes_and_comes, segments_go, kills)
#: Somewhat less than there are.
STATES_MIN = 60


def enumerate_life(scenario: Scenario, *, one_in: int) -> int:
    """Check the crash states of a life, or a sample; how many different ones there were."""
    rng = random.Random(SEED)
    life = LongRetryLife()
    scenario(life)
    census = Census(scenario.__name__, one_in=one_in)
    with quietly():
        for count, image in images(life.disk.first_image, life.disk.operations):
            told = sum(at <= count for at in (*life.accepted.values(), *life.acking.values()))
            for state in census.drawn_cuts(image, (told,), rng, scattered=2):
                _check(state, life, count, f"{census.where}, {count} operations")
    return len(census)


def _check(image: Image, life: LongRetryLife, count: int, where: str) -> None:
    clock = FakeClock()
    clock.wall_ms = END_MS
    try:
        served = Served(Store.open(PassingDisk(image), clock, OPTIONS), clock)
        found: list[bytes] = []
        for _ in range(4):
            served.turn()
            while (given := served.pull()) is not None:
                found += [decode_record(SUBJECT, record).body for record in given.records]
                served.settle(given, None)
            clock.pass_ms(HOUR_MS)
    except QmqError as error:
        raise BrokenPromiseError(f"{where}: {error!r}") from error
    if served.broker.long_retries.lost_copies:
        raise BrokenPromiseError(f"{where}: a copy never came")
    if len(set(found)) != len(found):
        raise BrokenPromiseError(f"{where}: given twice: {found}")
    for body, accepted_at in life.accepted.items():
        may_be_done = body in life.acking and life.acking[body] <= count
        if accepted_at <= count and body not in found and not may_be_done:
            raise BrokenPromiseError(f"{where}: {body!r} is lost")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_D3_a_long_retry_ends_whatever_a_power_cut_leaves(scenario: Scenario, one_in: int) -> None:
    states = enumerate_life(scenario, one_in=one_in)
    print(f"{states} crash states, seed {SEED}")
    assert states >= STATES_MIN


def _no_long_retry_is_known(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LongRetries, "is_in", lambda *_: False)


def _noted_without_a_copy(patch: pytest.MonkeyPatch) -> None:
    begin = LongRetryScheduler._begin

    def noted_at_once(
        self: LongRetryScheduler, group: Group, runs: list[Redelivery], now_ms: int
    ) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self._writer, "submit", lambda _, on_done: on_done(None))
            return begin(self, group, runs, now_ms)

    patch.setattr(LongRetryScheduler, "_begin", noted_at_once)


@pytest.mark.parametrize("plant", [_no_long_retry_is_known, _noted_without_a_copy])
def test_a_planted_mistake_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((BrokenPromiseError, AssertionError)):
        enumerate_life(goes_and_comes, one_in=CHECKED)
