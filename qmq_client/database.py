"""Opens engines for configured databases, in processes that have no engine of their own.

Applications bring their engines. Errors of SQLAlchemy and the drivers are translated in one place,
`database_errors`; no text that leaves it contains a password.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import URL, make_url

from qmq_client.errors import ConfigurationError, DatabaseUnavailableError, OutboxMissingError
from qmq_client.outbox.database import pymysql_connect
from qmq_client.outbox.database.mysql import lift_limits
from qmq_client.outbox.table import Tables, choose_journal, make_tables
from qmq_client.settings.masking import mask_secrets
from qmq_client.settings.sections import DatabaseSection

#: Databases with a module in `outbox/` and `inbox/`.
KNOWN_DATABASES: Final = ("mariadb", "mysql", "postgresql", "sqlite")
#: The driver for a URL that names none; applications with an event loop use others, these processes
#: do not.
_DRIVERS: Final = {
    "mariadb": "pymysql",
    "mysql": "pymysql",
    "postgresql": "psycopg",
    "sqlite": "pysqlite",
}
_DRIVERS_WITH_A_LOOP: Final = ("aiomysql", "aiosqlite", "asyncmy", "asyncpg", "psycopg_async")
#: What installs a driver that does not come with the product.
_EXTRAS: Final = {"postgresql": 'pip install "qmq[postgres]"'}
#: Long enough for a distant network, short enough for an address where nobody answers.
_CONNECT_S_MAX: Final = 5
#: PyMySQL's connect time-out ends as soon as the kernel accepts; a server that is frozen then never
#: answers. Longer than any statement of ours except those of a migration.
_ANSWER_S_MAX: Final = 60
_MIGRATION_ANSWER_S_MAX: Final = 3_600
_ERROR_CHARACTERS_MAX: Final = 300
_PASSWORD_CHARACTERS_MAX: Final = 4_096
#: Codes for a missing table, column or schema; drivers have no common error for these.
_MISSING_CODES: Final = (1146, 1054, "42P01", "42703", "3F000")
#: MySQL's code for a missing schema, and for a URL's database, which a migration does not create.
#: MariaDB reports the table instead if a statement names the schema.
_NO_DATABASE: Final = 1049
_MISSING_IN_SQLITE: Final = ("no such table", "no such column")


def open_engine(
    section: DatabaseSection, environment: Mapping[str, str], *, may_create: bool = False
) -> sa.Engine:
    """An engine for this database; does not connect yet. Raises `ConfigurationError`.

    A missing file is an error unless `may_create`, which is for migrations: SQLite would create an
    empty one. Connecting to an address where nobody answers fails within seconds, and waiting for a
    server that has stopped answering within a minute, unless the URL says otherwise.
    """
    url = known_url(section, environment)
    backend = url.get_backend_name()
    if backend == "sqlite" and _is_in_memory(url):
        raise ConfigurationError(
            setting=f"database.{section.name}.url",
            value=f"{mask_secrets(section.url)}: a database in memory, which no other process sees",
            remedy="Give a file, like sqlite:////var/lib/shop/orders.db.",
        )
    try:
        # The second one is for work beside a sweep; `OutboxStore.rest` closes it.
        engine = sa.create_engine(
            url,
            pool_size=2,
            pool_use_lifo=True,
            connect_args=_driver_arguments(url, may_create),
            **_driver_option(url),
        )
    except ImportError as error:
        raise _no_driver(section, url, error) from error
    except sa.exc.ArgumentError as error:
        raise _not_usable(section, str(error)) from error
    if backend in ("mysql", "mariadb"):
        event.listen(engine, "connect", lift_limits)
    if backend != "sqlite":
        return engine
    refuse = _refuse_missing_directory if may_create else _refuse_missing_file
    event.listen(engine, "do_connect", refuse)
    if may_create:
        event.listen(engine, "connect", choose_journal)
    return engine


def _is_in_memory(url: URL) -> bool:
    """Whether the database ends with its only connection; SQLAlchemy then uses a pool without bounds."""
    return ":memory:" in (url.database or ":memory:") or url.query.get("mode") == "memory"


def known_url(section: DatabaseSection, environment: Mapping[str, str]) -> URL:
    """The URL with a driver for these processes; raises `ConfigurationError` if no outbox can be there."""
    url = with_driver(database_url(section, environment))
    backend = url.get_backend_name()
    if backend not in KNOWN_DATABASES:
        raise ConfigurationError(
            setting=f"database.{section.name}.url",
            value=f"{mask_secrets(section.url)}: the kind is {backend}",
            remedy=f"The outbox knows {', '.join(KNOWN_DATABASES)}.",
        )
    return url


def with_driver(url: URL) -> URL:
    """The same database through a driver that these processes can use.

    That is a blocking driver, and the one we install if the URL names none.
    """
    backend, _, driver = url.drivername.partition("+")
    if backend == "postgres":  # what some hosts write, and SQLAlchemy no longer reads
        backend = "postgresql"
    if backend in _DRIVERS and (not driver or driver in _DRIVERS_WITH_A_LOOP):
        driver = _DRIVERS[backend]
    return url.set(drivername=f"{backend}+{driver}" if driver else backend)


def _driver_option(url: URL) -> dict[str, Any]:
    """The driver's module, if SQLAlchemy should use another than its own choice."""
    is_pymysql = url.drivername.endswith(f"+{pymysql_connect.DRIVER}")
    return {"module": pymysql_connect.driver()} if is_pymysql else {}


def _driver_arguments(url: URL, may_create: bool) -> dict[str, int | str]:
    """Time-outs and the encoding for the driver, as far as the URL does not set them."""
    answer_s = _MIGRATION_ANSWER_S_MAX if may_create else _ANSWER_S_MAX
    arguments: dict[str, dict[str, int | str]] = {
        "pymysql": {
            "connect_timeout": _CONNECT_S_MAX,
            "read_timeout": answer_s,
            "write_timeout": answer_s,
        },
        "psycopg": {
            "connect_timeout": _CONNECT_S_MAX,
            # The kernel then notices a host that is gone, even in the middle of a statement.
            "tcp_user_timeout": _ANSWER_S_MAX * 1000,
            "keepalives_idle": _ANSWER_S_MAX // 4,
            # A row may have any key. And where the database is SQL_ASCII, as `initdb` makes it
            # without a locale, psycopg would give bytes, on which SQLAlchemy fails with a TypeError.
            "client_encoding": "utf8",
        },
    }
    chosen = arguments.get(url.get_driver_name() if "+" in url.drivername else "", {})
    return {name: value for name, value in chosen.items() if name not in url.query}


def database_url(section: DatabaseSection, environment: Mapping[str, str]) -> URL:
    """The URL with its password, wherever that is kept."""
    try:
        url = make_url(section.url)
    except (sa.exc.ArgumentError, ValueError):
        # The cause would show the URL, and the password in it.
        raise _not_usable(section, "not a database URL") from None
    if "@" in (url.host or ""):
        # Drivers name the host in their errors, and here it would begin with the end of the password.
        raise ConfigurationError(
            setting=f"database.{section.name}.url",
            value=f"{mask_secrets(section.url)}: an @ before the host",
            remedy="Write an @ in a name or password as %40, or give the password by password_env.",
        )
    if section.password_file:
        return url.set(password=_read_password(section))
    if not section.password_env:
        return url
    if section.password_env not in environment:
        raise ConfigurationError(
            setting=f"database.{section.name}.password_env",
            value=f"{section.password_env} is not in the environment",
            remedy="Set it to the password.",
        )
    return url.set(password=environment[section.password_env])


def _read_password(section: DatabaseSection) -> str:
    """The first line of the password file."""
    try:
        with Path(section.password_file).open(encoding="utf-8") as file:
            return file.readline(_PASSWORD_CHARACTERS_MAX).rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        # The cause of the second would show the file's contents.
        problem = error.strerror if isinstance(error, OSError) else "no text"
        raise ConfigurationError(
            setting=f"database.{section.name}.password_file",
            value=f"{section.password_file}: {problem}",
            remedy="Name a file that this process may read, with the password in its first line.",
        ) from None


def section_tables(section: DatabaseSection) -> Tables:
    """The tables under the names that this database uses."""
    return make_tables(sa.MetaData(), schema=section.schema or None, prefix=section.table_prefix)


@contextmanager
def database_errors(name: str, *, remedy: str = "Run `qmq db migrate` for it.") -> Iterator[None]:
    """Translate exceptions of the database library within the block into our own.

    `remedy` creates the missing tables.
    """
    try:
        yield
    except sa.exc.SQLAlchemyError as error:
        reason = _reason(error)
        if _is_missing(error):
            raise OutboxMissingError(f"database {name}: {reason}. {remedy}") from error
        raise DatabaseUnavailableError(f"database {name}: {reason}") from error


def _is_missing(error: sa.exc.SQLAlchemyError) -> bool:
    if not isinstance(error, sa.exc.DBAPIError) or error.orig is None:
        return False
    origin = error.orig
    first = origin.args[0] if origin.args else ""
    if first == _NO_DATABASE:
        return error.statement is not None
    # PyMySQL reports both, and its numbers are more precise.
    codes = (first, getattr(origin, "sqlstate", None))
    return any(code in _MISSING_CODES for code in codes) or str(first).startswith(
        _MISSING_IN_SQLITE
    )


def _refuse_missing_file(
    _dialect: Any, _record: Any, arguments: Sequence[Any], _options: Any
) -> None:
    path = _file(arguments)
    if path is not None and not path.exists():
        raise sqlite3.OperationalError(
            f"there is no file {path}; `qmq db migrate` makes it, with the tables"
        )


def _refuse_missing_directory(
    _dialect: Any, _record: Any, arguments: Sequence[Any], _options: Any
) -> None:
    path = _file(arguments)
    if path is not None and not path.parent.is_dir():
        raise sqlite3.OperationalError(
            f"{path} cannot be made: there is no directory {path.parent}; make it first"
        )


def _file(arguments: Sequence[Any]) -> Path | None:
    """The file that SQLite would open; None for a database in memory or a SQLite URI."""
    path = str(arguments[0])
    return None if path == ":memory:" or path.startswith("file:") else Path(path)


def _reason(error: sa.exc.SQLAlchemyError) -> str:
    origin = error.orig if isinstance(error, sa.exc.DBAPIError) else None
    cause = error if origin is None else origin
    text = str(cause)
    match cause.args:
        case int(number), str(said):  # PyMySQL's, which would be shown as a tuple
            text = f"{said} (error {number})"
    text = " ".join(text.split()) or type(cause).__name__
    return mask_secrets(text)[:_ERROR_CHARACTERS_MAX]


def _no_driver(section: DatabaseSection, url: URL, error: ImportError) -> ConfigurationError:
    backend = url.get_backend_name()
    ours = f"{backend}+{_DRIVERS[backend]}"
    install = _EXTRAS.get(backend, f"Write {ours}:// for the one that comes with the product")
    return ConfigurationError(
        setting=f"database.{section.name}.url",
        value=f"{mask_secrets(section.url)}: the driver is not installed ({error})",
        remedy=f"{install}." if url.drivername == ours else f"Install it, or write {ours}://.",
    )


def _not_usable(section: DatabaseSection, problem: str) -> ConfigurationError:
    return ConfigurationError(
        setting=f"database.{section.name}.url",
        value=f"{mask_secrets(section.url)}: {mask_secrets(problem)}",
        remedy="Give one like sqlite:////var/lib/shop/orders.db, and install its driver.",
    )
