"""From a URL to an engine: drivers, bounds in time, and errors that say what to do."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from qmq_client.database.engine import open_engine
from qmq_client.database.errors import database_errors
from qmq_client.database.url import with_driver
from qmq_client.errors import ConfigurationError, DatabaseUnavailableError, OutboxMissingError
from qmq_client.settings.sections import DatabaseSection
from tests.conftest import MakeDatabase
from tests.services.databases import Database, is_mariadb

MODULES = {
    "mysql+mysqldb": "MySQLdb",
    "postgresql+psycopg2": "psycopg2",
    "postgresql+pg8000": "pg8000",
}


def section(url: str) -> DatabaseSection:
    return DatabaseSection(name="shop", url=url)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("mysql", "mysql+pymysql"),
        ("mariadb", "mariadb+pymysql"),
        ("postgresql", "postgresql+psycopg"),
        ("postgres", "postgresql+psycopg"),
        ("sqlite", "sqlite+pysqlite"),
        ("mysql+asyncmy", "mysql+pymysql"),
        ("mysql+aiomysql", "mysql+pymysql"),
        ("postgresql+asyncpg", "postgresql+psycopg"),
        ("postgresql+psycopg_async", "postgresql+psycopg"),
        ("sqlite+aiosqlite", "sqlite+pysqlite"),
        ("mysql+mysqldb", "mysql+mysqldb"),
        ("oracle", "oracle"),
    ],
)
def test_a_url_without_a_driver_or_with_one_for_loops_gets_ours(given: str, used: str) -> None:
    assert with_driver(make_url(f"{given}://a:b@c/d")).drivername == used


@pytest.mark.parametrize(
    ("given", "away", "used"),
    [
        ("postgresql+asyncpg", ("psycopg",), "postgresql+psycopg2"),
        ("postgresql+asyncpg", ("psycopg", "psycopg2"), "postgresql+pg8000"),
        ("postgresql", ("psycopg", "psycopg2", "pg8000"), "postgresql+psycopg"),
        ("mysql+aiomysql", ("pymysql",), "mysql+mysqldb"),
        ("mariadb+asyncmy", ("pymysql", "MySQLdb"), "mariadb+pymysql"),
    ],
)
def test_a_url_with_a_driver_for_loops_gets_the_blocking_one_that_is_installed(
    monkeypatch: pytest.MonkeyPatch, given: str, away: tuple[str, ...], used: str
) -> None:
    for module in ("pymysql", "MySQLdb", "psycopg", "psycopg2", "pg8000"):
        there = ModuleType(module)
        there.__spec__ = ModuleSpec(module, None)
        monkeypatch.setitem(sys.modules, module, None if module in away else there)
    assert with_driver(make_url(f"{given}://a:b@c/d")).drivername == used


def test_what_others_do_before_a_connect_of_pymysql_is_done() -> None:
    """A listener of ours that connects itself would keep theirs from being asked."""
    engine = open_engine(section("mysql://shop@127.0.0.1:1/shop"), {})
    asked: list[dict[str, Any]] = []

    @sa.event.listens_for(engine, "do_connect")
    def limit(_dialect: Any, _record: Any, _arguments: Any, options: dict[str, Any]) -> None:
        asked.append(options)

    with pytest.raises(sa.exc.OperationalError):
        engine.connect()
    assert len(asked) == 1


def test_what_pymysql_lacks_for_a_password_is_reported_with_what_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without `cryptography` PyMySQL raises this in the middle of its first exchange with the server."""
    says = "'cryptography' package is required for sha256_password or caching_sha2_password"

    def lacking(_connection: object, _socket: object = None) -> None:
        raise RuntimeError(f"{says} auth methods")

    monkeypatch.setattr("pymysql.connections.Connection.connect", lacking)
    engine = open_engine(section("mysql://shop:hunter2@127.0.0.1:1/shop"), {})
    told = pytest.raises(
        DatabaseUnavailableError, match=r"pip install cryptography.*or connect by TLS"
    )
    with told as raised, database_errors("shop"):
        engine.connect()
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite:///file::memory:?cache=shared&uri=true",
        "sqlite:///file:shop?mode=memory&uri=true",
    ],
)
@pytest.mark.parametrize("may_create", [True, False])
def test_a_database_in_memory_is_refused(url: str, may_create: bool) -> None:
    with pytest.raises(ConfigurationError, match=r"in memory.*Give a file"):
        open_engine(section(url), {}, may_create=may_create)


@pytest.mark.parametrize("kind", ["mysql", "mariadb", "postgresql", "sqlite"])
def test_an_engine_without_a_driver_in_its_url_connects(
    make_database: MakeDatabase, kind: str
) -> None:
    database = make_database("mysql" if kind == "mariadb" else kind)
    if kind == "mariadb":
        with database.engine().connect() as connection:
            if not is_mariadb(connection.engine):
                pytest.skip("SQLAlchemy refuses MySQL under this name")
    url = make_url(database.url).set(drivername=kind)
    engine = open_engine(section(url.render_as_string(hide_password=False)), {}, may_create=True)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1
    engine.dispose()


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("postgresql://a:hunter2@b/c", 'pip install "qmq[postgres]"'),
        ("mysql://a:hunter2@b/c", "mysql"),
        ("mysql+mysqldb://a:hunter2@b/c", r"write mysql\+pymysql://"),
        ("postgresql+psycopg2://a:hunter2@b/c", r"write postgresql\+psycopg://"),
    ],
)
def test_a_driver_that_is_not_installed_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, url: str, remedy: str
) -> None:
    for module in ("pymysql", "MySQLdb", "psycopg", "psycopg2", "pg8000"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigurationError) as caught:
        open_engine(section(url), {})
    caught.match(remedy.replace("[", r"\[").replace("]", r"\]"))
    assert "hunter2" not in str(caught.value)


def test_every_wait_has_an_end_on_mysql(mysql_database: Database) -> None:
    engine = open_engine(section(mysql_database.url), {})
    migrating = open_engine(section(mysql_database.url), {}, may_create=True)
    with engine.connect() as usual, migrating.connect() as long:
        driver: Any = usual.connection.dbapi_connection
        other: Any = long.connection.dbapi_connection
        assert (driver.connect_timeout, driver._read_timeout) == (5, 60)
        assert (other.connect_timeout, other._read_timeout) == (5, 3600)
    engine.dispose()
    migrating.dispose()


def test_every_wait_has_an_end_on_postgresql(postgresql_database: Database) -> None:
    engine = open_engine(section(postgresql_database.url), {})
    with engine.connect() as connection:
        driver: Any = connection.connection.dbapi_connection
        given = driver.info.get_parameters()
    engine.dispose()
    assert (given["connect_timeout"], given["tcp_user_timeout"]) == ("5", "60000")


@pytest.mark.parametrize(
    ("driver", "limits"),
    [
        ("mysql+mysqldb", {"connect_timeout": 5, "read_timeout": 60, "write_timeout": 60}),
        ("postgresql+psycopg2", {"connect_timeout": 5, "tcp_user_timeout": 60_000}),
        ("postgresql+pg8000", {"timeout": 60}),
    ],
)
def test_every_wait_of_other_drivers_has_an_end(driver: str, limits: dict[str, int]) -> None:
    pytest.importorskip(MODULES[driver])
    engine = open_engine(section(f"{driver}://a@127.0.0.1:1/b"), {})
    given: dict[str, Any] = {}

    @sa.event.listens_for(engine, "do_connect")
    def catch(*arguments: Any) -> None:
        given.update(arguments[-1])

    with pytest.raises(sa.exc.DBAPIError):
        engine.connect()
    engine.dispose()
    assert limits.items() <= given.items()


@pytest.mark.parametrize("driver", ["postgresql+psycopg2", "postgresql+pg8000"])
def test_other_drivers_of_postgresql_connect_with_their_limits(
    postgresql_database: Database, driver: str
) -> None:
    pytest.importorskip(MODULES[driver])
    url = make_url(postgresql_database.url).set(drivername=driver)
    engine = open_engine(section(url.render_as_string(hide_password=False)), {})
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1
    engine.dispose()


def test_no_error_shows_parameters(a_database: Database) -> None:
    url = a_database.url
    engine = open_engine(section(url), {}, may_create=True)
    query = sa.text("SELECT 1 FROM missing WHERE body = :body")
    with engine.connect() as connection, pytest.raises(sa.exc.DBAPIError) as caught:
        connection.execute(query, {"body": "hunter2"})
    engine.dispose()
    assert "hunter2" not in str(caught.value)


def test_a_row_that_postgresql_shows_is_not_told(postgresql_database: Database) -> None:
    engine = postgresql_database.engine()
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE bodies (body text, size int CHECK (size > 9))")
    insert = sa.text("INSERT INTO bodies VALUES ('hunter2', 1)")
    with (
        pytest.raises(DatabaseUnavailableError, match="bodies_size_check") as caught,
        database_errors("shop"),
        engine.begin() as connection,
    ):
        connection.execute(insert)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("query", "encoding"), [("", "utf-8"), ("?client_encoding=latin1", "iso8859-1")]
)
def test_text_from_postgresql_is_text_whatever_the_encoding_of_the_database(
    postgresql_database: Database, query: str, encoding: str
) -> None:
    """`initdb` without a locale makes SQL_ASCII, of which psycopg gives bytes."""
    administrator = postgresql_database.engine(isolation_level="AUTOCOMMIT")
    with administrator.connect() as connection:
        name = postgresql_database.name
        connection.exec_driver_sql(f"ALTER DATABASE {name} SET client_encoding TO SQL_ASCII")
    engine = open_engine(section(postgresql_database.url + query), {})
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT 'für'").scalar() == "für"
        driver: Any = connection.connection.dbapi_connection
        assert driver.info.encoding == encoding, "the URL's own choice counts"
    engine.dispose()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Connections are accepted by the kernel, and nobody ever says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


@pytest.mark.parametrize(
    "url",
    ["mysql://a@127.0.0.1:{}/b?read_timeout=1", "postgresql://a@127.0.0.1:{}/b?connect_timeout=2"],
)
def test_a_server_that_says_nothing_is_given_up(silent_port: int, url: str) -> None:
    """Also shows that the URL's own bounds count."""
    engine = open_engine(section(url.format(silent_port)), {})
    with pytest.raises(DatabaseUnavailableError), database_errors("shop"):
        engine.connect()
    engine.dispose()


MISSING = ["SELECT * FROM not_there", "SELECT not_there FROM there"]


@pytest.mark.parametrize("statement", MISSING)
def test_a_table_or_column_that_is_missing_asks_for_a_migration(
    a_database: Database, statement: str
) -> None:
    with a_database.engine().begin() as connection:
        connection.exec_driver_sql("CREATE TABLE there (id INTEGER)")
    with (
        pytest.raises(OutboxMissingError, match="qmq db migrate"),
        database_errors("shop"),
        a_database.engine().connect() as connection,
    ):
        connection.exec_driver_sql(statement)


def test_a_database_that_is_not_there_is_none_that_a_migration_would_make(
    a_server_database: Database,
) -> None:
    url = sa.make_url(a_server_database.url).set(database="nowhere_at_all")
    engine = sa.create_engine(url)
    with pytest.raises(DatabaseUnavailableError, match="nowhere_at_all"), database_errors("shop"):
        engine.connect()


def test_a_mysql_where_nobody_listens_is_reported_in_words_not_as_a_tuple() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        engine = open_engine(section(f"mysql://a@127.0.0.1:{closed.getsockname()[1]}/shop"), {})
        says = r"^database shop: Can't connect to MySQL server .* \(error 2003\)$"
        with pytest.raises(DatabaseUnavailableError, match=says), database_errors("shop"):
            engine.connect()


@pytest.mark.parametrize(
    "url",
    [
        "mysql://127.0.0.1:1/shop?sslmode=require",
        "mysql://127.0.0.1:1/shop?charset=nonsense",
        "mysql://127.0.0.1:1/shop?connect_timeout=soon",
        "mysql://127.0.0.1:1/shop?ssl_check_hostname=perhaps",
        "postgresql://127.0.0.1:1/shop?sslmode=perhaps",
        "postgresql://127.0.0.1:1/shop?nonsense=1",
        "postgresql://127.0.0.1:1/shop?connect_timeout=soon",
        "sqlite:////nowhere/shop.db?timeout=soon",
    ],
)
def test_an_option_of_a_url_that_no_driver_takes_is_a_declared_error(url: str) -> None:
    with pytest.raises((ConfigurationError, DatabaseUnavailableError)), database_errors("shop"):
        open_engine(section(url), {}).connect()


def test_a_kind_of_database_that_has_no_outbox_is_named_with_those_that_have_one() -> None:
    says = (
        r"^database.shop.url: oracle://b/c: a oracle database\. "
        r"Use one that the outbox works with: .*sqlite\.$"
    )
    with pytest.raises(ConfigurationError, match=says):
        open_engine(section("oracle://b/c"), {})


def test_a_schema_that_is_missing_is_told_apart_from_a_server_that_is_away(
    a_server_database: Database,
) -> None:
    engine = a_server_database.engine()
    with pytest.raises(OutboxMissingError), database_errors("shop"), engine.connect() as connection:
        connection.execute(sa.text("SELECT * FROM nowhere_at_all.there"))
