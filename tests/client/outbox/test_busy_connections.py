"""Sends while the application reads or writes a stream through the same connection.

The drivers of MySQL take no statement in the middle of an unbuffered result, or end it with a warning;
an INSERT of a message is none the better.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.client.world import Order, World, a_world
from tests.conftest import MakeDatabase

#: Far more than a driver reads ahead.
_ROWS: Final = 300
_LABELS: Final = [f"{number:05d}" for number in range(_ROWS)]
_STREAMED: Final[dict[str, Any]] = {"stream_results": True, "yield_per": 10}


@pytest.fixture(params=itertools.product(("sqlite", "postgresql"), (False, True)), ids=str)
def busy_world(
    request: pytest.FixtureRequest, make_database: MakeDatabase, tmp_path: Path
) -> Iterator[World]:
    kind, strict = request.param
    with a_world(tmp_path, database=make_database(kind), strict=strict) as world:
        yield world


def test_S1_a_send_cuts_short_no_result_that_is_still_being_read(busy_world: World) -> None:
    world = busy_world
    with world.engine.begin() as connection:
        connection.execute(sa.insert(Order), [{"label": label} for label in _LABELS])
    with Session(world.engine) as session:
        _send_for_the_first(world, session, 2 * _ROWS)
        session.commit()
    assert world.outcome() == (_LABELS, _LABELS, set())


def test_S1_S2_of_a_result_that_was_read_in_part_the_messages_are_those_of_the_commit(
    busy_world: World,
) -> None:
    world = busy_world
    with world.engine.begin() as connection:
        connection.execute(sa.insert(Order), [{"label": label} for label in _LABELS])
    with Session(world.engine) as session:
        _send_for_the_first(world, session, 200)
        session.rollback()
        _send_for_the_first(world, session, 2)
        session.commit()
    assert world.outcome() == (_LABELS, _LABELS[:2], set())


def _send_for_the_first(world: World, session: Session, count: int) -> None:
    labels = sa.select(Order.label).order_by(Order.label).execution_options(**_STREAMED)
    with closing(session.scalars(labels)) as found:
        for label in islice(found, count):
            world.send(label, session)
