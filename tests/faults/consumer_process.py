"""A consumer with an inbox as a process of its own: `python -m tests.faults.consumer_process DATABASE BROKER`.

Each message leaves one row in `effect`, in the transaction of its inbox row. Runs until SIGTERM.
"""

from __future__ import annotations

import sys
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from qmq_client.consumer import Consumers, consumer
from qmq_client.transport.http import HttpTransport
from tests.client.world import SUBJECT, prepare

GROUP: Final = "partitioned"
#: So short that a test can wait for them to end.
LEASE_MS: Final = 1_000
ANSWER_S: Final = 0.5


def main(database_url: str, broker_url: str) -> None:
    """See the module."""
    engine = sa.create_engine(database_url)
    prepare(engine)

    @consumer(
        SUBJECT,
        group=GROUP,
        inbox=sessionmaker(engine),
        lease_ms=LEASE_MS,
        wait_ms=200,
        max_attempts=1_000,
    )
    def handler(label: str, session: Session) -> None:
        session.execute(sa.text("INSERT INTO effect VALUES (:label)"), {"label": label})

    transport = HttpTransport(broker_url, connect_timeout_s=ANSWER_S, answer_timeout_s=ANSWER_S)
    consumers = Consumers([handler], transport)
    print("ready", flush=True)
    consumers.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
