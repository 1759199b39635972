"""Settings of servers and files, planted on real ones: found, told how to mend, and gone after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.pool import NullPool

from qmq_client.doctor import examine
from qmq_client.errors import OutboxMissingError
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.table import create_tables
from tests.client.doctor.ward import (
    WithOptions,
    a_server,
    a_shop,
    finding_of,
    ids,
    mend,
    run,
    sound_sqlite,
)
from tests.services.databases import Databases, is_mariadb
from tests.services.private import PrivateServer

MYSQL = {
    "mysql.flush_log": "SET GLOBAL innodb_flush_log_at_trx_commit = 2",
    "mysql.sync_binlog": "SET GLOBAL sync_binlog = 0",
    "mysql.binlog_format": "SET GLOBAL binlog_format = 'STATEMENT'",
    "mysql.sql_mode": "SET GLOBAL sql_mode = 'NO_ENGINE_SUBSTITUTION'",
    "mysql.max_allowed_packet": "SET GLOBAL max_allowed_packet = 1048576",
    "server.read_only": "SET GLOBAL read_only = 1",
    "session.time_zone": "SET GLOBAL time_zone = '+09:00'",
}
POSTGRESQL = {
    "postgresql.fsync": ["ALTER SYSTEM SET fsync = off; SELECT pg_reload_conf()"],
    "postgresql.full_page_writes": [
        "ALTER SYSTEM SET full_page_writes = off; SELECT pg_reload_conf()"
    ],
    "postgresql.synchronous_commit": [
        "ALTER DATABASE shop SET synchronous_commit = off",
        "ALTER ROLE qmq SET synchronous_commit = off",
        "ALTER ROLE qmq IN DATABASE shop SET synchronous_commit = off",
        "ALTER SYSTEM SET synchronous_commit = off; SELECT pg_reload_conf()",
    ],
    "server.read_only": ["ALTER DATABASE shop SET default_transaction_read_only = on"],
    "session.time_zone": ["ALTER DATABASE shop SET TimeZone = 'Asia/Tokyo'"],
}
#: What mended the test before may hide what is planted next.
AS_NEW = "ALTER DATABASE shop RESET ALL; ALTER SYSTEM RESET ALL; SELECT pg_reload_conf()"
SQLITE = {
    "sqlite.journal_mode": "PRAGMA journal_mode = DELETE",
    "sqlite.journal_off": "PRAGMA journal_mode = MEMORY",
    "sqlite.synchronous": "PRAGMA synchronous = NORMAL",
    "sqlite.busy_timeout": "PRAGMA busy_timeout = 0",
    "server.read_only": "PRAGMA query_only = ON",
}


@pytest.fixture(scope="module")
def mysql_shop(databases: Databases) -> Iterator[sa.Engine]:
    options = ("--log-bin=log", "--server-id=1", "--sync-binlog=1", "--default-time-zone=+00:00")
    with a_server(databases, "mysql", *options) as server:
        yield a_shop(server)


@pytest.fixture(scope="module")
def postgresql_server(databases: Databases) -> Iterator[PrivateServer]:
    with a_server(databases, "postgresql") as server:
        yield server


@pytest.fixture(scope="module")
def postgresql_shop(postgresql_server: PrivateServer) -> sa.Engine:
    return a_shop(postgresql_server)


@pytest.mark.parametrize("id_", MYSQL)
def test_X1_a_bad_setting_of_mysql_is_found_and_gone_after_its_fix(
    mysql_shop: sa.Engine, id_: str
) -> None:
    assert ids(examine(mysql_shop)) == []
    run(mysql_shop, MYSQL[id_])
    finding = mend(mysql_shop, id_)
    assert finding.fix.startswith("SET GLOBAL ")
    assert ids(examine(mysql_shop)) == []


def test_X1_W6_sessions_of_mysql_that_may_only_read_are_found_and_refused(
    mysql_shop: sa.Engine,
) -> None:
    variable = "tx_read_only" if is_mariadb(mysql_shop) else "transaction_read_only"
    run(mysql_shop, f"SET GLOBAL {variable} = 1")
    with pytest.raises(sa.exc.OperationalError, match=rf"@@{variable} is on.*SET GLOBAL"):
        OutboxStore(mysql_shop).check_schema()
    mend(mysql_shop, "server.read_only")
    OutboxStore(mysql_shop).check_schema()


def test_O1_W7_a_binary_log_of_statements_is_refused_before_rows_wait_forever(
    mysql_shop: sa.Engine,
) -> None:
    run(mysql_shop, MYSQL["mysql.binlog_format"])
    store = OutboxStore(mysql_shop)
    with pytest.raises(OutboxMissingError, match=r"STATEMENT.*SET GLOBAL binlog_format") as refused:
        store.check_schema()
    assert "migrate" not in str(refused.value), "other tables would not help"
    mend(mysql_shop, "mysql.binlog_format")
    store.check_schema()
    assert store.claim(token=bytes(16), limit=1, lease_ms=1) == []


def test_X1_a_server_without_doublewrite_is_found(databases: Databases) -> None:
    with a_server(databases, "mysql", "--innodb-doublewrite=0") as server:
        engine = a_shop(server)
        finding = finding_of(engine, "mysql.doublewrite")
        assert finding is not None
        assert "innodb_doublewrite = ON" in finding.fix
        assert isinstance(server._recipe, WithOptions)
        server._recipe.options.append("--innodb-doublewrite=ON")
        server.restart()
        assert finding_of(engine, "mysql.doublewrite") is None


@pytest.mark.parametrize(
    ("id_", "planted"), [(id_, each) for id_, all_ in POSTGRESQL.items() for each in all_]
)
def test_X1_a_bad_setting_of_postgresql_is_found_and_gone_after_its_fix(
    postgresql_shop: sa.Engine, id_: str, planted: str
) -> None:
    run(postgresql_shop, AS_NEW)
    run(postgresql_shop, planted)
    mend(postgresql_shop, id_)
    assert ids(examine(postgresql_shop)) == []


def test_X1_a_setting_in_the_url_is_told_to_be_removed_there(
    postgresql_server: PrivateServer, postgresql_shop: sa.Engine
) -> None:
    url = postgresql_shop.url.update_query_dict({"options": "-c synchronous_commit=off"})
    engine = sa.create_engine(url, poolclass=NullPool)
    finding = finding_of(engine, "postgresql.synchronous_commit")
    assert finding is not None
    assert finding.fix.startswith("remove synchronous_commit from the URL")


def test_X1_a_replica_is_found(databases: Databases) -> None:
    with a_server(databases, "postgresql") as server:
        engine = a_shop(server)
        server.stop()
        signal = server.folder / "data" / "standby.signal"
        signal.touch()
        server.start()
        finding = finding_of(engine, "server.read_only")
        assert finding is not None
        assert "primary" in finding.fix
        signal.unlink()
        server.restart()
        assert finding_of(engine, "server.read_only") is None


@pytest.mark.parametrize("id_", SQLITE)
def test_X1_a_bad_setting_of_sqlite_is_found_and_gone_after_its_fix(
    tmp_path: Path, id_: str
) -> None:
    engine = sound_sqlite(tmp_path / "shop.db")
    statements = [SQLITE[id_]]

    @sa.event.listens_for(engine, "connect")
    def on_connect(driver: Any, _: Any) -> None:
        for statement in statements:
            driver.execute(statement)

    finding = finding_of(engine, id_)
    assert finding is not None
    statements.append(finding.fix)
    assert ids(examine(engine)) == []


def test_X1_a_database_in_memory_has_no_durability_to_lose() -> None:
    engine = sa.create_engine("sqlite://", poolclass=sa.pool.StaticPool)
    create_tables(engine)
    assert ids(examine(engine)) == []
    engine.dispose()
