"""A consumer that writes a history: `python -m tests.faults.witness_process DATABASE BROKER DIRECTORY NAME`.

Each delivery is written down before its effect, which is one row in `effect` in the transaction of the
inbox. Runs until SIGTERM, or is killed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from qmq_client.consumer import Consumers, Delivery, consumer
from tests.client.world import SUBJECT, prepare
from tests.kit.events import Delivered
from tests.kit.history import History, body_hash

GROUP: Final = "witnesses"
#: So short that a test can wait for them to end.
LEASE_MS: Final = 1_000


def main(database_url: str, broker_url: str, directory: str, name: str) -> None:
    """See the module."""
    engine = sa.create_engine(database_url)
    prepare(engine)
    history = History.open(Path(directory), name)

    @consumer(
        SUBJECT,
        group=GROUP,
        inbox=sessionmaker(engine),
        lease_ms=LEASE_MS,
        wait_ms=200,
        max_attempts=1_000,
    )
    def handler(delivery: Delivery, session: Session) -> None:
        message = delivery.message
        assert message.message_id is not None
        assert isinstance(message.body, bytes)
        history.write(
            Delivered(
                group=GROUP,
                consumer=name,
                message_id=message.message_id,
                subject=message.subject,
                attempt=delivery.attempt,
                body_hash=body_hash(message.body, dict(message.headers)),
                sequence=delivery.sequence,
            )
        )
        effect = sa.text("INSERT INTO effect VALUES (:label)")
        session.execute(effect, {"label": message.message_id})

    Consumers([handler], broker_url, consumer_id=name).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
