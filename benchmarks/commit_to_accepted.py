"""R9: from the return of the commit to the broker's durable answer, while nothing else goes on.

One transaction with one INSERT and one send, then a wait for the producer's `on_sent`, then a pause in
which the publisher comes to rest, then the next one.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Sequence
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from benchmarks.load import BODY_BYTES, make_messages
from benchmarks.measure import percentile
from benchmarks.places import Place, open_places
from benchmarks.processes import written_bytes
from benchmarks.result import Conditions, Goal, Row
from benchmarks.shop import Order, make_order
from benchmarks.suite import Bench
from qmq_client import Message, Producer, ProducerOptions

#: Longer than the publisher's linger, so that each send finds it idle.
PAUSE_S: Final = 0.03
ANSWER_DEADLINE_S: Final = 10.0
WARM_UP_MESSAGES: Final = 10


class NotAcceptedError(Exception):
    """No answer came for a message."""


def run(bench: Bench) -> list[Row]:
    """Percentiles of each round, in milliseconds, one database after the other."""
    with open_places(bench) as places:
        return [row for place in places for row in run_place(bench, place)]


def run_place(bench: Bench, place: Place) -> list[Row]:
    """All figures on one database."""
    message_count = bench.effort.pick(tiny=3, quick=40, full=120)
    outcomes = [run_round(bench, place, i, message_count) for i in range(bench.rounds)]
    rounds = [times for times, _ in outcomes]
    conditions = Conditions(
        durability=place.durability,
        client="SQLAlchemy ORM, one caller thread, publisher thread; HttpTransport",
        batch_messages=1,
        message_bytes=BODY_BYTES,
        written_bytes=sorted(written for _, written in outcomes)[len(outcomes) // 2],
        note=f"{message_count} transactions per round, {1000 * PAUSE_S:.0f} ms apart",
    )
    figures = [
        ("commit → accepted, p50", 0.5, Goal(bound=3, is_floor=False)),
        ("commit → accepted, p99", 0.99, Goal(bound=15, is_floor=False)),
    ]
    return [
        Row(
            figure=f"{place.name}: {figure}",
            unit="ms",
            samples=tuple(percentile(times, share) for times in rounds),
            conditions=conditions,
            goal=goal,
        )
        for figure, share, goal in figures
    ]


def run_round(
    bench: Bench, place: Place, number: int, message_count: int
) -> tuple[list[float], int]:
    """Milliseconds from each commit to the answer, and bytes written; broker and database are new."""
    with bench.processes() as processes:
        broker = processes.start_broker()
        engine = place.open(f"shop_{number}")

        def all_bytes() -> int:
            own_bytes = broker.written_bytes() + written_bytes(os.getpid())
            return own_bytes + place.written_bytes()

        answers: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        options = ProducerOptions(on_sent=lambda ids: note(answers, ids))
        messages = make_messages()
        try:
            with Producer(engine, broker.url, options=options) as producer:
                for i in range(WARM_UP_MESSAGES):
                    send_one(engine, producer, answers, make_order(i), next(messages))
                before_bytes = all_bytes()
                times = [
                    send_one(engine, producer, answers, make_order(i), next(messages))
                    for i in range(message_count)
                ]
                producer.flush(ANSWER_DEADLINE_S)
                after_bytes = all_bytes()
        finally:
            engine.dispose()
    return times, after_bytes - before_bytes


def note(answers: queue.SimpleQueue[tuple[str, int]], message_ids: Sequence[str]) -> None:
    """Called by the publisher when the broker has accepted messages."""
    answered_ns = time.monotonic_ns()
    for message_id in message_ids:
        answers.put((message_id, answered_ns))


def send_one(
    engine: sa.Engine,
    producer: Producer,
    answers: queue.SimpleQueue[tuple[str, int]],
    order: Order,
    message: Message,
) -> float:
    """Milliseconds from the commit's return; raises `NotAcceptedError` when no answer comes."""
    time.sleep(PAUSE_S)
    with Session(engine) as session:
        session.add(order)
        sent_id = producer.send(message, session=session)
        session.commit()
        committed_ns = time.monotonic_ns()
    try:
        answered_id, answered_ns = answers.get(timeout=ANSWER_DEADLINE_S)
    except queue.Empty:
        raise NotAcceptedError(f"no answer for {sent_id} in {ANSWER_DEADLINE_S:.0f} s") from None
    if answered_id != sent_id:
        raise NotAcceptedError(f"sent {sent_id}, but {answered_id} was answered")
    return (answered_ns - committed_ns) / 1e6
