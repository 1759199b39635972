"""An application as a process of its own, to be killed at a chosen boundary.

`python -m tests.faults.shop_process DATABASE_URL BROKER_URL BOUNDARY [stop]` places orders 0, 1, 2, …
with one message each, and says what it does, a line each: `committing LABEL`, `committed LABEL`. At the
boundary, in its third order, it says `here` and waits to be killed, or with `stop` until somebody who
stopped it lets it go on (SIGCONT):

- `send`: the message is noted, nothing is written;
- `insert`: the row is written, COMMIT is not sent;
- `commit`: the commit is done, the message not handed to the broker;
- `accept`: the broker has the message, the row is not deleted.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session

from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.outbox.table import DEFAULT_TABLES
from qmq_client.producer import Producer
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.requests import SendAnswer
from tests.client.world import SUBJECT, Order, prepare
from tests.kit.waiting import wait_for

OUTBOX = DEFAULT_TABLES.outbox
BOUNDARIES = ("send", "insert", "commit", "accept")
LAST = 2


class Boundary:
    """Where this process ends."""

    def __init__(self, name: str, *, is_end: bool) -> None:
        self._name = name
        self._is_end = is_end
        self.is_reached = False
        self.on_continued: Callable[[], object] = lambda: None

    def pass_by(self, name: str) -> None:
        """Wait here when this is the place and the time."""
        if not self.is_reached or name != self._name:
            return
        self.is_reached = False
        goes_on = threading.Event()
        if not self._is_end:
            self.on_continued = goes_on.set
        say("here")
        goes_on.wait()


class Transport(HttpTransport):
    """Passes by the boundaries around a request."""

    boundary: Boundary

    def send(self, frame: bytes) -> SendAnswer:
        self.boundary.pass_by("commit")
        answer = super().send(frame)
        self.boundary.pass_by("accept")
        return answer


def say(text: str) -> None:
    """To the test, at once and in one piece: two threads speak."""
    os.write(sys.stdout.fileno(), f"{text}\n".encode())


def main(database_url: str, broker_url: str, boundary_name: str, then: str = "end") -> None:
    """See the module."""
    boundary = Boundary(boundary_name, is_end=then == "end")
    signal.signal(signal.SIGCONT, lambda *_: boundary.on_continued())
    engine = sa.create_engine(database_url)
    prepare(engine)
    transport = Transport(broker_url)
    transport.boundary = boundary
    producer = Producer(engine, transport, options=ProducerOptions(delete_delay_ms=1))

    @event.listens_for(engine, "commit")
    def _before_commit(_: Any) -> None:  # after the producer's own listener: the row is written
        boundary.pass_by("insert")

    def is_empty() -> bool:
        with engine.connect() as connection:
            return connection.scalar(sa.select(sa.func.count()).select_from(OUTBOX)) == 0

    for i in range(LAST + 1):
        if i == LAST:  # a transaction that deletes would sleep with its locks
            wait_for(is_empty)
            boundary.is_reached = True
        with Session(engine) as session:
            session.execute(sa.insert(Order).values(label=f"{i}"))
            producer.send(Message(SUBJECT, f"{i}"), session=session)
            boundary.pass_by("send")
            say(f"committing {i}")
            session.commit()
            say(f"committed {i}")
        if i < LAST:
            assert producer.flush()
    producer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
