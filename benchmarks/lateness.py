"""How late delayed messages come, and what they do to everybody else; a part of R12.

One producer sends messages that fall due at a steady rate. Background it, each in a process of its own: a
consumer, whose handler looks how late it is; a sender of single ordinary messages, who looks how long the
answer takes, also for a while before; and somebody who syncs a page of a file of his own,
so that a slow disk is seen as such. A release counts when it is durable, by the broker's own clock.

Sends and syncs begin at set times, as messages fall due, and each is counted from its time on: a disk
that stands still for half a second is then seen by all that fell into it, and not by one in a thousand.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.load import BODY_BYTES, SUBJECT, encode_message
from benchmarks.measure import percentile
from benchmarks.processes import OPENER, Broker
from benchmarks.result import Conditions, Goal, Row
from benchmarks.suite import Bench
from benchmarks.worker import Control
from qmq_client import Consumers, Message, consumer
from qmq_client.errors import BrokerBusyError
from qmq_client.ids import MESSAGE_IDS
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import FrameKind, build_message_frame
from qmq_client.wire.record import Record, encode_record

#: The stated rate, how long before its time a message is sent, and in how many sends a second.
RATE_PER_S: Final = 5_000
AHEAD_S: Final = 1.5
SENDS_PER_S: Final = 10
#: Ordinary messages and syncs beside it, and how often one begins.
OTHER: Final = "flight.landed"
EVERY_S: Final = 0.05
PAGE_BYTES: Final = 4096
DEADLINE_S: Final = 60
_SHARE: Final = 0.99
_TIME_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """All in milliseconds, and each the 99th percentile."""

    released: float
    handled: float
    flushed: float
    sent_before: float
    sent_beside: float
    written_bytes: int


def rows(bench: Bench) -> list[Row]:
    """One sample each round."""
    seconds = bench.effort.pick(tiny=1, quick=5, full=20)
    per_s = bench.effort.pick(tiny=100, quick=RATE_PER_S, full=RATE_PER_S)
    rounds = [_round(bench, per_s, seconds) for _ in range(bench.rounds)]
    conditions = Conditions(
        durability="fdatasync before a release counts",
        client="HttpTransport; broker, producer, consumer, sender and syncs each a process of their own",
        batch_messages=per_s // SENDS_PER_S,
        message_bytes=BODY_BYTES,
        written_bytes=rounds[-1].written_bytes,
        note=f"{per_s:,} messages a second for {seconds} s; at release the upper end of the broker's class",
    )
    goal = Goal(bound=200, is_floor=False)
    figures: list[tuple[str, Callable[[_Round], float], Goal | None]] = [
        ("lateness at release, p99", lambda one: one.released, goal),
        ("lateness at the handler, p99", lambda one: one.handled, None),
        ("fdatasync beside it, p99", lambda one: one.flushed, None),
        ("ordinary send before it, p99", lambda one: one.sent_before, None),
        ("ordinary send beside it, p99", lambda one: one.sent_beside, None),
    ]
    return [
        Row(
            figure=figure,
            unit="ms",
            samples=tuple(of(one) for one in rounds),
            conditions=conditions,
            goal=bound,
        )
        for figure, of, bound in figures
    ]


def _round(bench: Bench, per_s: int, seconds: int) -> _Round:
    os.sync()  # what was written and removed before is not this round's
    with bench.processes() as processes:
        broker = processes.start_broker()
        handler = processes.start_worker(
            f"{__name__}:handle", broker_url=broker.url, count=per_s * seconds
        )
        sender = processes.start_worker(f"{__name__}:send", broker_url=broker.url)
        handler.hear()
        sent_before = _told(sender, seconds / 5)
        flusher = processes.start_worker(
            f"{__name__}:flush", path=str(processes.directory / "page")
        )
        for worker in (sender, flusher):
            worker.hear()
            worker.tell("go")
        _send_steadily(broker, per_s, seconds)
        released = _late_p99_ms(broker.url, per_s * seconds)
        for worker in (sender, flusher):
            worker.tell("stop")
        return _Round(
            released=released,
            handled=handler.hear(),
            flushed=flusher.hear(),
            sent_before=sent_before,
            sent_beside=sender.hear(),
            written_bytes=broker.written_bytes(),
        )


def _told(worker: Any, seconds: float) -> float:
    """What a worker measures in so many seconds."""
    worker.hear()
    worker.tell("go")
    time.sleep(seconds)
    worker.tell("stop")
    measured: float = worker.hear()
    return measured


def _send_steadily(broker: Broker, per_s: int, seconds: int) -> None:
    transport = HttpTransport(broker.url)
    began_s, count = time.time(), per_s // SENDS_PER_S
    try:
        for number in range(seconds * SENDS_PER_S):
            first_s = began_s + AHEAD_S + number / SENDS_PER_S
            due_at_ms = [round((first_s + place / per_s) * 1000) for place in range(count)]
            records = [_record(due_ms) for due_ms in due_at_ms]
            _send(transport, build_message_frame({SUBJECT: records}, kind=FrameKind.DELAYED))
            time.sleep(max(0.0, began_s + (number + 1) / SENDS_PER_S - time.time()))
    finally:
        transport.close()


def _send(transport: HttpTransport, frame: bytes) -> None:
    """Send it, as a producer does: a broker that waits for its disk is asked again when it says."""
    while True:
        try:
            transport.send(frame)
            return
        except BrokerBusyError as busy:
            time.sleep(busy.retry_after_s)


def _record(due_at_ms: int) -> bytes:
    return encode_record(
        Record(
            message_id=MESSAGE_IDS.next_id(),
            subject=SUBJECT,
            body=due_at_ms.to_bytes(_TIME_BYTES, "big").ljust(BODY_BYTES, b"."),
            born_at_ms=0,
            due_at_ms=due_at_ms,
        )
    )


def _late_p99_ms(url: str, count: int) -> float:
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        with OPENER.open(f"{url}/v1/delayed/status", timeout=10) as answer:
            status = json.load(answer)
        if status["released"] >= count:
            return float(status["late_p99_ms"])
        time.sleep(0.1)
    raise RuntimeError(f"{status['released']} of {count} messages were released")


def handle(control: Control, *, broker_url: str, count: int) -> None:
    """The consumer; ended by its parent."""
    late_ms: list[float] = []

    @consumer(SUBJECT, group="gate")
    def on_message(message: Message) -> None:
        due_at_ms = int.from_bytes(message.body[:_TIME_BYTES], "big")
        late_ms.append(time.time() * 1000 - due_at_ms)
        if len(late_ms) == count:
            control.tell(percentile(late_ms, _SHARE))

    control.tell("ready")
    Consumers([on_message], broker_url).run()


def send(control: Control, *, broker_url: str) -> None:
    """Ordinary messages, one at a time."""
    transport = HttpTransport(broker_url)
    message = Message(OTHER, bytes(BODY_BYTES))
    _measure(
        control, lambda: _send(transport, build_message_frame({OTHER: [encode_message(message)]}))
    )


def flush(control: Control, *, path: str) -> None:
    """The disk alone: the same page again and again, in a file that does not grow."""
    with open(path, "wb", buffering=0) as file:
        file.write(bytes(PAGE_BYTES))
        os.fsync(file.fileno())

        def write_page() -> None:
            os.pwrite(file.fileno(), bytes(PAGE_BYTES), 0)
            os.fdatasync(file.fileno())

        _measure(control, write_page)


def _measure(control: Control, work: Callable[[], object]) -> None:
    """Do it at set times between two words of the parent, as often as it says so.

    Counted from the set time: what stands behind a slow one waits, too.
    """
    while True:
        control.tell("ready")
        control.hear()
        is_told, times_ms, due_s = control.when_told(), [], time.perf_counter()
        while not is_told():
            work()
            times_ms.append((time.perf_counter() - due_s) * 1000)
            due_s += EVERY_S
            time.sleep(max(0.0, due_s - time.perf_counter()))
        control.tell(percentile(times_ms, _SHARE))
