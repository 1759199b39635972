"""A pool rolls back what comes back to it. Behind a COMMIT there is nothing to roll back, and the drivers
of MySQL ask the server all the same: a round trip for each transaction of the application.

It is spared only where the driver was given nothing to do since, by whatever way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from pymysql.err import ProgrammingError
from sqlalchemy.orm import Session

from qmq_client.outbox.database.driver import driver_of
from tests.client.world import Order, World, a_world
from tests.services.databases import Database

_INSERT = "INSERT INTO business_order (label) VALUES ('behind')"


def rollbacks(connection: sa.Connection) -> tuple[int, int]:
    """The session's number, and how often its server was asked to roll back."""
    (number,) = connection.exec_driver_sql("SELECT CONNECTION_ID()").one()
    _, count = connection.exec_driver_sql("SHOW SESSION STATUS LIKE 'Com_rollback'").one()
    return number, int(count)


def commit_one(world: World, label: str) -> None:
    with Session(world.engine) as session, session.begin():
        session.add(Order(label=label))
        world.send(label, session)


def test_S13_no_rollback_follows_a_commit_to_the_server(
    mysql_database: Database, tmp_path: Path
) -> None:
    with a_world(tmp_path, database=mysql_database) as world:
        with world.engine.connect() as connection:
            number, before = rollbacks(connection)
        for label in ("a", "b", "c"):
            commit_one(world, label)
        with world.engine.connect() as connection:
            # One for the look before, which did not commit.
            assert rollbacks(connection) == (number, before + 1)
        assert world.outcome() == (["a", "b", "c"], ["a", "b", "c"], set())


def by_cursor(driver: Any) -> None:
    driver.cursor().execute(_INSERT)


def by_returning(driver: Any) -> None:
    driver.cursor().execute(f"{_INSERT} RETURNING id")


def by_begin(driver: Any) -> None:
    driver.begin()


def by_error(driver: Any) -> None:
    """The error's answer says nothing of the transaction, and the one before said nothing either."""
    by_returning(driver)
    with pytest.raises(ProgrammingError):
        driver.cursor().execute("INSERT INTO no_such_table VALUES (1)")


@pytest.mark.parametrize("behind", [by_cursor, by_returning, by_begin, by_error])
def test_S2_what_the_driver_was_given_behind_a_commit_is_rolled_back(
    mysql_database: Database, tmp_path: Path, behind: Callable[[Any], None]
) -> None:
    with a_world(tmp_path, database=mysql_database) as world:
        dialect: Any = world.engine.dialect
        if behind in (by_returning, by_error) and not dialect.is_mariadb:
            pytest.skip("MySQL has no INSERT … RETURNING")
        with world.engine.connect() as connection:
            number, before = rollbacks(connection)
        with world.engine.connect() as connection:
            connection.execute(sa.insert(Order).values(label="a"))
            world.send("a", connection)
            connection.commit()
            behind(driver_of(connection))
        commit_one(world, "b")  # on the same connection: it would commit what was left open
        with world.engine.connect() as connection:
            assert rollbacks(connection) == (number, before + 2)
        assert world.outcome() == (["a", "b"], ["a", "b"], set())
