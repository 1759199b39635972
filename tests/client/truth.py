"""What is really in a database: asked through a plain connection of the driver, each time a new one.

Nothing here is SQLAlchemy or ours, so that neither can make a wrong answer look right.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any, Final

import psycopg
import pymysql
from sqlalchemy.engine import make_url

from tests.services.mysql import WITHOUT_TLS

_CONNECT_S_MAX: Final = 60


class Truth:
    """Reads and changes one database behind everybody's back."""

    def __init__(self, url: str) -> None:
        self._url = make_url(url)
        self.kind = self._url.get_backend_name()

    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Rows as committed now; `?` stands for a value."""
        with closing(self.connect()) as connection, closing(connection.cursor()) as cursor:
            cursor.execute(self._marks(query, values), values)
            return [tuple(row) for row in cursor.fetchall()]

    def change(self, query: str, *values: Any) -> int:
        """Change and commit; how many rows."""
        with closing(self.connect()) as connection:
            with closing(connection.cursor()) as cursor:
                cursor.execute(self._marks(query, values), values)
                count = int(cursor.rowcount)
            connection.commit()
            return count

    def connect(self) -> Any:
        """A connection of the driver; the caller closes it."""
        url = self._url
        if self.kind == "sqlite":
            return sqlite3.connect(str(url.database))
        if self.kind == "mysql":
            return pymysql.connect(
                host=url.host or "127.0.0.1",
                port=url.port or 3306,
                user=url.username,
                password=url.password or "",
                database=url.database,
                unix_socket=url.query.get("unix_socket"),
                charset="utf8mb4",
                connect_timeout=_CONNECT_S_MAX,
                ssl_disabled=WITHOUT_TLS in url.query,
            )
        return psycopg.connect(
            host=url.host,
            port=url.port,
            user=url.username,
            password=url.password,
            dbname=url.database,
            connect_timeout=_CONNECT_S_MAX,
        )

    def _marks(self, query: str, values: tuple[Any, ...]) -> str:
        return query if self.kind == "sqlite" or not values else query.replace("?", "%s")
