"""Opens engines for configured databases. Applications bring their own.

Errors that PyMySQL raises in its own code, for a missing library or an unknown option, become errors of
the database with a remedy.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import URL

from qmq_client.database.url import DRIVERS, known_url, not_usable
from qmq_client.errors import ConfigurationError
from qmq_client.outbox.database.mysql import lift_limits
from qmq_client.outbox.table import Tables, choose_journal, make_tables
from qmq_client.settings.masking import mask_secrets
from qmq_client.settings.sections import DatabaseSection

#: Install command for a driver that is not part of the product.
_EXTRAS: Final = {"postgresql": 'pip install "qmq[postgres]"'}
#: Long enough for a distant network, short enough for an address without an answer.
_CONNECT_S_MAX: Final = 5
#: PyMySQL's connect time-out ends as soon as the kernel accepts; a frozen server then never
#: answers. Longer than any statement of QMQ except those of a migration.
_ANSWER_S_MAX: Final = 60
_MIGRATION_ANSWER_S_MAX: Final = 3_600


def open_engine(
    section: DatabaseSection, environment: Mapping[str, str], *, may_create: bool = False
) -> sa.Engine:
    """An engine for this database; does not connect yet. Raises `ConfigurationError`.

    A missing file is an error unless `may_create`, which is for migrations: SQLite would create an
    empty one. Connecting to an address that does not answer fails within seconds, and waiting for a
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
        # The second one is for work during a sweep; `OutboxStore.rest` closes it.
        engine = sa.create_engine(
            url,
            pool_size=2,
            pool_use_lifo=True,
            hide_parameters=True,  # its errors are shown, and may contain records
            connect_args=_driver_arguments(url, may_create),
            **_driver_option(url),
        )
    except ImportError as error:
        raise _no_driver(section, url, error) from error
    except (sa.exc.ArgumentError, ValueError) as error:  # ValueError: for an invalid number
        raise not_usable(section, str(error)) from error
    if backend in ("mysql", "mariadb"):
        event.listen(engine, "connect", lift_limits)
    if backend != "sqlite":
        return engine
    refuse = _refuse_missing_directory if may_create else _refuse_missing_file
    event.listen(engine, "do_connect", refuse)
    if may_create:
        event.listen(engine, "connect", choose_journal)
    return engine


def section_tables(section: DatabaseSection) -> Tables:
    """The tables under the names that this database uses."""
    return make_tables(sa.MetaData(), schema=section.schema or None, prefix=section.table_prefix)


def _is_in_memory(url: URL) -> bool:
    """Whether the database ends with its only connection; SQLAlchemy then uses a pool without bounds."""
    return ":memory:" in (url.database or ":memory:") or url.query.get("mode") == "memory"


def _driver_option(url: URL) -> dict[str, Any]:
    """The driver's module, if SQLAlchemy should not use its default."""
    is_pymysql = url.drivername.endswith(f"+{DRIVER}")
    return {"module": driver()} if is_pymysql else {}


def _driver_arguments(url: URL, may_create: bool) -> dict[str, int | str]:
    """Time-outs and the encoding for the driver, as far as the URL does not set them."""
    answer_s = _MIGRATION_ANSWER_S_MAX if may_create else _ANSWER_S_MAX
    of_mysql: dict[str, int | str] = {
        "connect_timeout": _CONNECT_S_MAX,
        "read_timeout": answer_s,
        "write_timeout": answer_s,
    }
    of_libpq: dict[str, int | str] = {
        "connect_timeout": _CONNECT_S_MAX,
        # The kernel then detects a lost host, even in the middle of a statement.
        "tcp_user_timeout": _ANSWER_S_MAX * 1000,
        "keepalives_idle": _ANSWER_S_MAX // 4,
        # A key may have any character. And if the database is SQL_ASCII, as `initdb` creates it
        # without a locale, psycopg would return bytes, on which SQLAlchemy fails with a TypeError.
        "client_encoding": "utf8",
    }
    arguments: dict[str, dict[str, int | str]] = {
        "pymysql": of_mysql,
        "mysqldb": of_mysql,
        "psycopg": of_libpq,
        "psycopg2": of_libpq,
        # One limit for the connection and for each answer.
        "pg8000": {"timeout": answer_s},
    }
    chosen = arguments.get(url.get_driver_name() if "+" in url.drivername else "", {})
    return {name: value for name, value in chosen.items() if name not in url.query}


def _refuse_missing_file(
    _dialect: Any, _record: Any, arguments: Sequence[Any], _options: Any
) -> None:
    path = _file(arguments)
    if path is not None and not path.exists():
        raise sqlite3.OperationalError(
            f"there is no file {path}; `qmq db migrate` creates it, with the tables"
        )


def _refuse_missing_directory(
    _dialect: Any, _record: Any, arguments: Sequence[Any], _options: Any
) -> None:
    path = _file(arguments)
    if path is not None and not path.parent.is_dir():
        raise sqlite3.OperationalError(
            f"{path} cannot be created: there is no directory {path.parent}; create it first"
        )


def _file(arguments: Sequence[Any]) -> Path | None:
    """The file that SQLite would open; None for a database in memory or a SQLite URI."""
    path = str(arguments[0])
    return None if path == ":memory:" or path.startswith("file:") else Path(path)


def _no_driver(section: DatabaseSection, url: URL, error: ImportError) -> ConfigurationError:
    backend = url.get_backend_name()
    ours = f"{backend}+{DRIVERS[backend]}"
    install = _EXTRAS.get(backend, f"Write {ours}:// for the driver that comes with the product")
    return ConfigurationError(
        setting=f"database.{section.name}.url",
        value=f"{mask_secrets(section.url)}: the driver is not installed ({error})",
        remedy=f"{install}." if url.drivername == ours else f"Install it, or write {ours}://.",
    )


#: SQLAlchemy's name of the driver concerned.
DRIVER: Final = "pymysql"
_LACKING: Final = "cryptography"
_REMEDY: Final = (
    "the server asks for the password by caching_sha2_password, and without TLS PyMySQL needs a library "
    "to encrypt it: `pip install cryptography`, or connect by TLS (?ssl_ca=FILE in the URL)"
)
#: PyMySQL fails in its own code on an option or a character set that it does not know.
_OPTIONS: Final = "PyMySQL cannot connect as the URL says after its `?`"


def driver() -> ModuleType:
    """PyMySQL with another `connect`, for `create_engine(module=…)`; raises `ImportError` without it.

    Not a listener of `do_connect`: if one returns a connection, later listeners are not called.
    """
    import pymysql  # imported late, because other databases do not need it

    def connect(*arguments: Any, **options: Any) -> Any:
        try:
            return pymysql.connect(*arguments, **options)
        except RuntimeError as error:
            if _LACKING not in str(error):
                raise
            raise pymysql.OperationalError(_REMEDY) from error
        except (TypeError, ValueError, AttributeError) as error:
            raise pymysql.OperationalError(f"{_OPTIONS}: {error}") from error

    made = ModuleType(pymysql.__name__)
    vars(made).update(vars(pymysql), connect=connect)
    return made
