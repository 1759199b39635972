"""A MySQL or MariaDB whose default engine keeps what was rolled back: our tables are never of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import sqlalchemy as sa

from qmq_client.doctor.drift import find_drift
from qmq_client.outbox.table import DEFAULT_TABLES, create_tables
from qmq_migrations.upgrade import migrate, upgrade_sql
from tests.conftest import MakeServer
from tests.services.databases import is_mariadb

NAMES = ("qmq_inbox", "qmq_order_lock", "qmq_outbox")


def engines_of(connection: sa.Connection) -> dict[str, str]:
    """Storage engine of each table of this database."""
    found = connection.exec_driver_sql(
        "SELECT table_name, engine FROM information_schema.tables WHERE table_schema = DATABASE()"
    )
    return {row[0]: row[1] for row in found}


def test_S1_where_another_storage_engine_is_the_default_our_tables_roll_back_nevertheless(
    make_private_server: MakeServer,
) -> None:
    server = make_private_server("mysql")
    administrator = sa.create_engine(server.url(), isolation_level="AUTOCOMMIT")
    with administrator.connect() as connection:
        connection.exec_driver_sql("SET GLOBAL default_storage_engine = 'MyISAM'")
        connection.exec_driver_sql("CREATE DATABASE shop")
    schemes = ("mysql", "mariadb") if is_mariadb(administrator) else ("mysql",)
    administrator.dispose()
    makers: tuple[Callable[[sa.Engine], object], ...] = (migrate, create_tables)
    for scheme, make in product(schemes, makers):
        engine = sa.create_engine(server.url("shop").replace("mysql", scheme, 1))
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE theirs (id INT)")
        make(engine)
        with engine.begin() as connection:
            engines = engines_of(connection)
            assert engines.pop("theirs") == "MyISAM", "what we did not name is of the default"
            assert {engines[name] for name in NAMES} == {"InnoDB"}
            assert find_drift(connection, DEFAULT_TABLES) == []
            for name in ("theirs", "qmq_version", *NAMES):
                connection.exec_driver_sql(f"DROP TABLE IF EXISTS {name}")
        engine.dispose()


@pytest.mark.parametrize("kind", ["mysql", "mariadb"])
def test_S1_printed_statements_name_the_storage_engine(kind: str) -> None:
    statements = upgrade_sql(kind).split(";")
    for name in NAMES:
        (create,) = (text for text in statements if f"CREATE TABLE {name} " in text)
        assert create.strip().endswith("ENGINE=InnoDB")
    assert "ENGINE" not in upgrade_sql("postgresql")
