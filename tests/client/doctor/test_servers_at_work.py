"""What goes on at a server: transactions that hold rows back, clocks, poolers, rights."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from qmq_client.doctor import examine
from qmq_client.outbox.table import create_tables
from tests.client.doctor.pooler import a_pooler
from tests.client.doctor.ward import IMPATIENT, a_server, a_shop, finding_of, ids, mend, run
from tests.conftest import MakeDatabase
from tests.kit.waiting import wait_for
from tests.services.databases import Database, Databases

#: InnoDB lists its transactions anew only when nobody has asked for 100 ms.
INNODB_LOOKS_ANEW_S = 0.25


@pytest.fixture
def shop(a_server_database: Database) -> sa.Engine:
    engine = a_server_database.engine(poolclass=NullPool)
    create_tables(engine)
    return engine


def put_marker(connection: Any) -> None:
    connection.execute(sa.text("INSERT INTO qmq_order_lock VALUES (1)"))


def test_X1_a_prepared_transaction_that_nobody_ends_is_found_with_its_age(
    databases: Databases, a_server_database: Database
) -> None:
    """On a server of its own: prepared transactions of MySQL belong to no database."""
    with a_server(databases, a_server_database.kind) as server:
        shop = a_shop(server)
        with Session(shop, twophase=True) as session:
            put_marker(session)
            connection = session.connection()
            session.prepare()
            driver: Any = connection.connection.driver_connection
            driver.close()  # the process died between the two phases
            connection.invalidate()
        assert finding_of(shop, "transactions.prepared") is None  # it may still be in time
        finding = mend(shop, "transactions.prepared", thresholds=IMPATIENT)
        assert "1 prepared transactions, the oldest for " in finding.read
        assert "ROLLBACK" in finding.fix
        run(shop, "DROP TABLE qmq_order_lock")  # which it had blocked


def test_X1_a_transaction_that_is_open_for_long_is_found_and_gone_when_ended(
    shop: sa.Engine,
) -> None:
    with shop.connect() as connection:
        put_marker(connection)
        assert finding_of(shop, "transactions.old") is None
        wait_for(
            lambda: finding_of(shop, "transactions.old", thresholds=IMPATIENT),
            look_s=INNODB_LOOKS_ANEW_S,
        )
        finding = finding_of(shop, "transactions.old", thresholds=IMPATIENT)
        assert finding is not None
        assert finding.fix.startswith(("KILL ", "SELECT pg_terminate_backend("))
        connection.rollback()


def test_X1_an_autovacuum_that_takes_long_is_no_old_transaction(databases: Databases) -> None:
    """It holds no rows back, and is nothing to be terminated."""
    slow = {"autovacuum": "on", "autovacuum_naptime": "1s", "autovacuum_vacuum_threshold": "1"}
    slow |= {"autovacuum_vacuum_cost_limit": "1", "autovacuum_vacuum_cost_delay": "100ms"}
    options = [f"--{name}={value}" for name, value in slow.items()]
    with a_server(databases, "postgresql", *options) as server:
        shop = a_shop(server)
        run(
            shop,
            "CREATE TABLE large AS SELECT i, repeat('x', 1000) AS text FROM generate_series(1, 10000) AS i; "
            "DELETE FROM large",
        )
        vacuums = "SELECT 1 FROM pg_stat_activity WHERE query ~ '^autovacuum: VACUUM .*large'"

        def is_at_work() -> bool:
            with shop.connect() as connection:
                return connection.exec_driver_sql(vacuums).first() is not None

        wait_for(is_at_work)
        finding = finding_of(shop, "transactions.old", thresholds=IMPATIENT)
        assert is_at_work(), "it ended too soon"
        assert finding is None


class ShiftedClock:
    """This machine's, put wrong."""

    def __init__(self, off_s: float) -> None:
        self._off_s = off_s

    def now_ms(self) -> int:
        return round((time.time() + self._off_s) * 1000)

    def monotonic_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        raise NotImplementedError  # an examination never waits


@pytest.mark.parametrize(("off_s", "side"), [(3600, "behind"), (-3600, "ahead of"), (0, None)])
def test_X1_clocks_that_differ_are_found(
    a_database: Database, off_s: float, side: str | None
) -> None:
    engine = a_database.engine(poolclass=NullPool)
    create_tables(engine)
    found = {finding.id: finding for finding in examine(engine, clock=ShiftedClock(off_s))}
    assert ("clock.difference" in found) is (side is not None)
    if side is not None:
        assert f" s {side} this machine" in found["clock.difference"].read
        assert found["clock.difference"].read.startswith("the database is 3,")


def test_X1_a_pooler_in_between_is_found(postgresql_database: Database) -> None:
    engine = postgresql_database.engine(poolclass=NullPool)
    create_tables(engine)
    assert finding_of(engine, "server.pooler") is None
    with a_pooler(engine.url.port or 5432) as port:
        pooled = sa.create_engine(engine.url.set(host="127.0.0.1", port=port), poolclass=NullPool)
        finding = finding_of(pooled, "server.pooler")
    assert finding is not None
    assert "connected to process 4242" in finding.read


GRANTS: dict[str, Callable[[str], str]] = {
    "mysql": lambda name: f"CREATE USER '{name}'@'%'; GRANT SELECT ON {name}.* TO '{name}'@'%'",
    "postgresql": lambda name: (
        f"CREATE ROLE {name} LOGIN; GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}"
    ),
}


@pytest.mark.parametrize("kind", GRANTS)
def test_X1_a_user_who_may_only_read_the_tables_is_told_what_was_not_seen(
    databases: Databases, kind: str
) -> None:
    with a_server(databases, kind) as server:
        shop = a_shop(server, "reader")
        run(shop, GRANTS[kind]("reader"))
        modest = sa.create_engine(shop.url.set(username="reader"), poolclass=NullPool)
        findings = examine(modest)
        assert set(ids(findings)) == {"rights.missing", "rights.role", "rights.write"}
        for finding in findings:
            run(shop, finding.fix)
        assert ids(examine(modest)) == []


def test_X1_a_user_who_may_not_read_the_rows_is_told_so(databases: Databases) -> None:
    with a_server(databases, "postgresql") as server:
        shop = a_shop(server, "reader")
        run(shop, "CREATE ROLE reader LOGIN; GRANT pg_read_all_stats TO reader")
        modest = sa.create_engine(shop.url.set(username="reader"), poolclass=NullPool)
        finding = mend(modest, "rights.missing", by=shop)
        assert finding.fix == "GRANT SELECT ON qmq_outbox TO reader"


def test_X1_a_prepared_transaction_of_any_name_can_be_ended_as_told(databases: Databases) -> None:
    with a_server(databases, "mysql") as server:
        shop = a_shop(server)
        name = "X'ff00fe',X'2701',7"
        connection = shop.connect()
        driver: Any = connection.connection.driver_connection
        for statement in (
            f"XA START {name}",
            "INSERT INTO qmq_order_lock VALUES (1)",
            f"XA END {name}",
            f"XA PREPARE {name}",
        ):
            driver.query(statement)
        driver.close()
        connection.invalidate()
        connection.close()
        mend(shop, "transactions.prepared", thresholds=IMPATIENT)


def test_an_examination_leaves_nothing_behind(make_database: MakeDatabase) -> None:
    """Neither in the tables nor in the connections of the application's pool."""
    for kind in ("mysql", "postgresql"):
        database = make_database(kind)
        engine = database.engine(pool_size=1, max_overflow=0)
        create_tables(engine)
        limit = {
            "mysql": "SELECT /*M!100100 @@max_statement_time */ /*!80000 @@max_execution_time */",
            "postgresql": "SHOW statement_timeout",
        }
        with engine.connect() as connection:
            before = connection.exec_driver_sql(limit[kind]).scalar_one()
        assert ids(examine(engine)) == []
        with engine.connect() as connection:
            assert connection.exec_driver_sql(limit[kind]).scalar_one() == before
