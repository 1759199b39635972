"""Sends while the application reads or writes a stream through the same connection.

Many messages are written before the commit, and with `strict` each one at once. A statement in the
middle of an unbuffered result would end it: PyMySQL drops the rest without an error, and the
application takes what it has seen for all there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.errors import OutboxError
from qmq_client.outbox.transaction.unit import ROWS_PER_INSERT_MAX
from tests.client.outbox.interference import driver_of
from tests.client.world import Order, World, a_world
from tests.services.databases import Database

#: More than are written at once, far more than a driver reads ahead.
_ROWS: Final = 3 * ROWS_PER_INSERT_MAX
_LABELS: Final = [f"{number:05d}" for number in range(_ROWS)]
_STREAMED: Final[dict[str, Any]] = {"stream_results": True, "yield_per": 10}


@pytest.fixture(params=["plain", "strict"])
def busy_world(
    request: pytest.FixtureRequest, a_database: Database, tmp_path: Path
) -> Iterator[World]:
    with a_world(tmp_path, database=a_database, strict=request.param == "strict") as world:
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
        _send_for_the_first(world, session, 2 * ROWS_PER_INSERT_MAX)
        session.rollback()
        _send_for_the_first(world, session, 2)
        session.commit()
    assert world.outcome() == (_LABELS, _LABELS[:2], set())


def _send_for_the_first(world: World, session: Session, count: int) -> None:
    labels = sa.select(Order.label).order_by(Order.label).execution_options(**_STREAMED)
    with closing(session.scalars(labels)) as found:
        for label in islice(found, count):
            world.send(label, session)


def test_S1_a_cancel_that_would_cut_a_result_short_is_refused(
    mysql_database: Database, tmp_path: Path
) -> None:
    with a_world(tmp_path, database=mysql_database) as world:
        with world.engine.begin() as connection:
            connection.execute(sa.insert(Order), [{"label": label} for label in _LABELS])
        seen: list[str] = []
        labels = sa.select(Order.label).order_by(Order.label).execution_options(**_STREAMED)
        with Session(world.engine) as session:
            message_id = world.send("no", session)
            for label in session.scalars(labels):
                if not seen:
                    with pytest.raises(OutboxError, match="cancel_now"):
                        world.producer.cancel(message_id, session=session)
                seen.append(label)
            assert world.producer.cancel(message_id, session=session)
            session.commit()
        assert (seen, world.outcome()) == (_LABELS, (_LABELS, [], set()))


def test_S1_sends_between_the_rows_of_a_copy_of_psycopg_go_with_it(
    postgresql_database: Database, tmp_path: Path
) -> None:
    with (
        a_world(tmp_path, database=postgresql_database) as world,
        world.engine.begin() as connection,
        driver_of(connection).cursor() as cursor,
    ):
        with cursor.copy("COPY business_order (label) FROM STDIN") as copy:
            for label in _LABELS:
                copy.write_row([label])
                world.send(label, connection)
        connection.commit()
        assert world.outcome() == (_LABELS, _LABELS, set())
