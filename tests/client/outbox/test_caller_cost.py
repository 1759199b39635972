"""What a transaction pays for being followed, counted in calls and not timed.

Behind a commit a processor has waited for a disk, and much of what it knew is gone from its caches: there
each function that is entered costs several times what it costs in a loop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import sqlalchemy as sa
from opentelemetry import trace
from sqlalchemy.orm import Session

import qmq_client
from tests.client.world import Order, World
from tests.kit.calls import called_by

_OURS: Final = str(Path(qmq_client.__file__).parent)


def entered_by(work: Callable[[], None]) -> list[str]:
    """Functions of the client that this thread enters meanwhile, in their order."""
    _, calls = called_by(work)
    return [
        f"{call.file.removeprefix(_OURS)}:{call.function}"
        for call in calls
        if call.kind == "call" and call.file.startswith(_OURS)
    ]


@pytest.mark.parametrize(
    ("messages", "is_traced", "calls_max"), [(0, False, 17), (1, False, 49), (1, True, 50)]
)
def test_S13_a_followed_transaction_enters_few_functions_of_ours(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    messages: int,
    is_traced: bool,
    calls_max: int,
) -> None:
    """Once an application has loaded OpenTelemetry, as other tests do, each send asks for its span."""
    monkeypatch.setitem(sys.modules, trace.__name__, trace)
    if not is_traced:
        monkeypatch.delitem(sys.modules, trace.__name__)

    def transaction() -> None:
        with Session(world.engine) as session, session.begin():
            session.add(Order(label=f"{len(labels)}"))
            for _ in range(messages):
                world.send(labels[-1], session)

    labels = ["first"]
    transaction()  # what is made once: statements, connections, the publisher's thread
    labels.append("second")
    entered = entered_by(transaction)
    assert len(entered) <= calls_max, "\n".join(entered)


def test_S13_the_pool_is_told_of_no_listener_by_a_producer(world: World) -> None:
    """One at the end of each transaction would cost it as much as its BEGIN."""
    with world.engine.begin() as connection:
        connection.execute(sa.insert(Order).values(label="a"))
    assert not world.engine.pool.dispatch.reset
