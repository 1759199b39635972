"""The URL of a configured database, completed with its password and a driver for commands and watchdog."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url

from qmq_client.errors import ConfigurationError
from qmq_client.settings.masking import mask_secrets
from qmq_client.settings.sections import DatabaseSection

#: Databases with a module in `outbox/` and `inbox/`.
KNOWN_DATABASES: Final = ("mariadb", "mysql", "postgresql", "sqlite")
#: The driver that QMQ installs, for a URL without one; commands and watchdog do not use asynchronous drivers.
DRIVERS: Final = {
    "mariadb": "pymysql",
    "mysql": "pymysql",
    "postgresql": "psycopg",
    "sqlite": "pysqlite",
}
#: Blocking drivers with their modules, the preferred one first.
_BLOCKING: Final[Mapping[str, Mapping[str, str]]] = {
    "mariadb": {"pymysql": "pymysql", "mysqldb": "MySQLdb"},
    "mysql": {"pymysql": "pymysql", "mysqldb": "MySQLdb"},
    "postgresql": {"psycopg": "psycopg", "psycopg2": "psycopg2", "pg8000": "pg8000"},
    "sqlite": {},
}
_DRIVERS_WITH_A_LOOP: Final = ("aiomysql", "aiosqlite", "asyncmy", "asyncpg", "psycopg_async")
_PASSWORD_CHARACTERS_MAX: Final = 4_096


def known_url(section: DatabaseSection, environment: Mapping[str, str]) -> URL:
    """The URL with a driver for these processes; raises `ConfigurationError` for a kind of database without support."""
    url = with_driver(database_url(section, environment))
    backend = url.get_backend_name()
    if backend not in KNOWN_DATABASES:
        raise ConfigurationError(
            setting=f"database.{section.name}.url",
            value=f"{mask_secrets(section.url)}: a {backend} database",
            remedy=f"Use one that the outbox works with: {', '.join(KNOWN_DATABASES)}.",
        )
    return url


def with_driver(url: URL) -> URL:
    """The same database through a driver that these processes can use.

    That is a blocking driver: the one that the URL names, or the first one that is installed.
    """
    backend, _, driver = url.drivername.partition("+")
    if backend == "postgres":  # a name that some hosts use, and SQLAlchemy no longer accepts
        backend = "postgresql"
    if backend in DRIVERS and (not driver or driver in _DRIVERS_WITH_A_LOOP):
        driver = _installed(backend)
    return url.set(drivername=f"{backend}+{driver}" if driver else backend)


def _installed(backend: str) -> str:
    """The first installed blocking driver; the one that QMQ installs if there is none."""
    there = (driver for driver, module in _BLOCKING[backend].items() if find_spec(module))
    return next(there, DRIVERS[backend])


def database_url(section: DatabaseSection, environment: Mapping[str, str]) -> URL:
    """The URL with its password from the URL, environment or file."""
    try:
        url = make_url(section.url)
    except (sa.exc.ArgumentError, ValueError):
        # The cause would show the URL, and the password in it.
        raise not_usable(section, "not a database URL") from None
    if "@" in (url.host or ""):
        # Drivers show the host in their errors, and here it would begin with the end of the password.
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
            remedy="Set the variable to the password.",
        )
    return url.set(password=environment[section.password_env])


def _read_password(section: DatabaseSection) -> str:
    """The first line of the password file."""
    try:
        with Path(section.password_file).open(encoding="utf-8") as file:
            return file.readline(_PASSWORD_CHARACTERS_MAX).rstrip("\r\n")
    except (OSError, ValueError) as error:  # ValueError: for the path or the content
        # The cause of a ValueError would show the file's contents.
        problem = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigurationError(
            setting=f"database.{section.name}.password_file",
            value=f"{section.password_file}: {problem}",
            remedy="Name a file that this process may read, with the password in its first line.",
        ) from None


def not_usable(section: DatabaseSection, problem: str) -> ConfigurationError:
    """The error for a URL that cannot be used; passwords in it and in the problem are masked."""
    return ConfigurationError(
        setting=f"database.{section.name}.url",
        value=f"{mask_secrets(section.url)}: {mask_secrets(problem)}",
        remedy="Give one like sqlite:////var/lib/shop/orders.db, and install its driver.",
    )
