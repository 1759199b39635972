"""Handlers that misbehave, as a process of their own: `python -m tests.faults.handlers_process DATABASE BROKER`.

What a message says is what its handler does: `exit`, `raise`, `hang`, `memory`; anything else is an
effect in the transaction of its inbox row. What ends the process works for a while first, so that others
in hand, which are done at once, do not go with it each time; those that hang leave threads for the others.
Runs until it is ended.
"""

from __future__ import annotations

import os
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
#: How long `exit` works before it ends the process.
WORK_S: Final = 0.4
#: Exit code of a process that a message has ended.
ENDED: Final = 9
#: More than any machine has.
_TOO_MUCH_BYTES: Final = 1 << 60


def handle(label: str, session: Session) -> None:
    """Do as the message says."""
    match label:
        case "exit":
            threading.Event().wait(WORK_S)
            os._exit(ENDED)
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
