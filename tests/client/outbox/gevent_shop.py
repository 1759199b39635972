"""A shop whose requests are greenlets.

`python -m gevent.monkey --module tests.client.outbox.gevent_shop DATABASE_URL WAY` places orders at once, through a `session` or a `core` connection, and prints how many messages arrived.
"""

from __future__ import annotations

import sys

import gevent
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client import Message, Producer
from qmq_client.testing import MemoryBroker, MemoryTransport
from tests.client.world import SUBJECT, Order, prepare

ORDERS = 100
DEADLINE_S = 60


def main(url: str, way: str) -> None:
    """See the module."""
    engine = sa.create_engine(url, pool_size=12)
    prepare(engine)
    broker = MemoryBroker()

    def place(label: str) -> None:
        with Session(engine) if way == "session" else engine.connect() as scope, scope.begin():
            scope.execute(sa.insert(Order).values(label=label))
            producer.send(Message(SUBJECT, label), session=scope)

    with Producer(engine, MemoryTransport(broker)) as producer:
        placing = [gevent.spawn(place, f"{number}") for number in range(ORDERS)]
        gevent.joinall(placing, raise_error=True)
        assert producer.flush(DEADLINE_S)
    print(len(broker.messages(SUBJECT)))


if __name__ == "__main__":
    main(*sys.argv[1:])
