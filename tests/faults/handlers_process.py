"""Handlers that misbehave, as a process of their own: `python -m tests.faults.handlers_process DATABASE BROKER`.

What a message says is what its handler does: `kill`, `raise`, `hang`, `memory`; anything else is an
effect in the transaction of its inbox row. `kill` ends the process at once, with all that it has in hand;
those that hang leave threads for the others. Runs until it is ended.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from qmq_client.consumer import Consumers, consumer
from qmq_client.retry import Backoff
from tests.client.world import SUBJECT, prepare

GROUP: Final = "misbehaving"
ATTEMPTS: Final = 3
LEASE_MS: Final = 1_000
#: More than any machine has.
_TOO_MUCH_BYTES: Final = 1 << 60


def handle(label: str, session: Session) -> None:
    """Do as the message says."""
    match label:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise RuntimeError(label)
        case "hang":
            threading.Event().wait()
        case "memory":
            bytearray(_TOO_MUCH_BYTES)
        case _:
            session.execute(sa.text("INSERT INTO effect VALUES (:label)"), {"label": label})


def main(database_url: str, broker_url: str) -> None:
    """See the module."""
    engine = sa.create_engine(database_url)
    prepare(engine)
    handler = consumer(
        SUBJECT,
        group=GROUP,
        inbox=sessionmaker(engine),
        concurrency=2 * ATTEMPTS,
        lease_ms=LEASE_MS,
        timeout_ms=LEASE_MS,
        wait_ms=200,
        max_attempts=ATTEMPTS,
        backoff=Backoff(first_ms=50, factor=1.0, max_ms=50),
    )(handle)
    Consumers([handler], broker_url).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
