"""A process that sends ordered messages, one transaction each, and says so: URL, broker, name, count."""

from __future__ import annotations

import sys

import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client import Message, Producer, ProducerOptions
from tests.client.world import SUBJECT, prepare


def main(url: str, broker: str, name: str, count: int) -> None:
    engine = sa.create_engine(url)
    prepare(engine)
    options = ProducerOptions(order_by_key=True, keep_sent_s=3600)
    with Producer(engine, broker, options=options) as producer:
        for i in range(count):
            with Session(engine) as session, session.begin():
                message = Message(SUBJECT, f"{name}.{i}", key="shared" if i % 3 else name)
                producer.send(message, session=session)
            print(i, flush=True)
        producer.flush(5.0)
    engine.dispose()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
