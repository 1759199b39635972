"""Senders and watchdogs as processes of their own, to be stopped and killed at a chosen moment.

`python -m tests.watchdog.processes ROLE DATABASE BROKER`, where ROLE is one of

- `producer`: commits one message, says `sending` when it is about to send it, and never does;
- `before_send`: a sweep that stops itself (SIGSTOP) when it has claimed and is about to send;
- `after_send`: a sweep that stops itself when the broker has accepted and nothing is settled.

A sweep prints its counts as JSON at the end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import sqlalchemy as sa

from qmq_client.message import Message
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.producer import Producer
from qmq_client.transactional import transaction
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.requests import SendAnswer
from qmq_watchdog.databases import Database
from qmq_watchdog.sweep import Sweep, SweepOptions
from tests.kit import warm
from tests.kit.waiting import DEADLINE_S, wait_for
from tests.watchdog.rows import SUBJECT


class SilentTransport(HttpTransport):
    """Says that it would send now, and then waits to be killed."""

    def send(self, frame: bytes) -> SendAnswer:
        print("sending", flush=True)
        threading.Event().wait()
        raise AssertionError("nobody killed this process")


class StoppingTransport(HttpTransport):
    """Stops its process before or after the request."""

    def __init__(self, broker_url: str, role: str) -> None:
        super().__init__(broker_url)
        self._role = role

    def send(self, frame: bytes) -> SendAnswer:
        if self._role == "before_send":
            os.kill(os.getpid(), signal.SIGSTOP)
        answer = super().send(frame)
        if self._role == "after_send":
            os.kill(os.getpid(), signal.SIGSTOP)
        return answer


def start(role: str, path: Path | str, broker_url: str) -> warm.Process:
    """One of the roles above as a process, at a database file or a URL."""
    line = ["tests.watchdog.processes", role, str(path), broker_url]
    return warm.start(line, stdout=subprocess.PIPE)


def wait_until_stopped(process: warm.Process) -> None:
    """Wait for its SIGSTOP."""
    if isinstance(process, warm.WarmProcess):
        wait_for(process.is_stopped, lambda: f"the sweep ended: {process.poll()}")
        return
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), f"the sweep ended: {status}"


def resume(process: warm.Process) -> dict[str, int]:
    """Let a stopped sweep go on; its counts."""
    os.kill(process.pid, signal.SIGCONT)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    counts: dict[str, int] = json.loads(output)
    return counts


def main(role: str, path: str, broker_url: str) -> None:
    engine = sa.create_engine(path if "://" in path else f"sqlite:///{path}")
    if role == "producer":
        producer = Producer(engine, SilentTransport(broker_url))
        with transaction(engine) as connection:
            producer.send(Message(SUBJECT, {"order": 1}), session=connection)
        threading.Event().wait()
    database = Database(name="shop", store=OutboxStore(engine), engine=engine)
    # A lease that outlasts the test: only the database's due time says that it has ended.
    options = SweepOptions(lease_ms=600_000)
    counts = Sweep(database, StoppingTransport(broker_url, role), options).step()
    print(json.dumps(counts.as_fields()))


if __name__ == "__main__":
    main(*sys.argv[1:])
