"""The rights of a database user on QMQ's tables, tested on the server instead of read from its grants.

EXPLAIN needs the rights of the explained statement but does not execute it: no row is written, and
no trigger or rule runs. So on all servers it also covers rights that come from a role, a column, a
pattern or ownership. SQLite has no users.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from qmq_client.outbox.database.dialect import error_code
from qmq_client.outbox.database.table_names import table_sql, table_text
from qmq_client.outbox.table import Tables

#: Denied for the database, the table, a column, or the whole server; MySQL 8 denies XA RECOVER as
#: 1401.
_MYSQL: Final = (1044, 1142, 1143, 1227, 1401)
_POSTGRESQL: Final = "42501"
_SELECT, _INSERT, _UPDATE, _DELETE = "SELECT", "INSERT", "UPDATE", "DELETE"
#: Columns of the outbox that are changed after the INSERT.
_CHANGED: Final = ("state", "due_at_ms", "token", "attempts", "last_error")


@dataclass(frozen=True, slots=True)
class Right:
    """A right on a table."""

    name: str
    #: The text between ON and TO.
    on: str


@dataclass(frozen=True, slots=True)
class Role:
    """One of QMQ's processes as a database user, with its rights. `docs/migrations.md` shows the same."""

    name: str
    outbox: tuple[str, ...] = ()
    inbox: tuple[str, ...] = ()
    order_lock: tuple[str, ...] = ()


_SENDING: Final = (_SELECT, _INSERT, _UPDATE, _DELETE)
_RELAYING: Final = (_SELECT, _UPDATE, _DELETE)
PRODUCER: Final = Role("producer", outbox=_SENDING)
PRODUCER_IN_ORDER: Final = Role(
    "producer with `order_by_key`", outbox=_SENDING, order_lock=(_SELECT, _INSERT, _UPDATE)
)
WATCHDOG: Final = Role("watchdog", outbox=_RELAYING)
WATCHDOG_OF_INBOX: Final = Role(
    "watchdog with `keep_inbox_s`", outbox=_RELAYING, inbox=(_SELECT, _DELETE)
)
CONSUMER: Final = Role("consumer with an inbox", inbox=(_SELECT, _INSERT))
ROLES: Final = (
    PRODUCER,
    PRODUCER_IN_ORDER,
    CONSUMER,
    Role(
        "consumer that purges its inbox or nacks within a batch",
        inbox=(_SELECT, _INSERT, _DELETE),
    ),
    WATCHDOG,
    WATCHDOG_OF_INBOX,
)


class Rights:
    """The rights of one connection's user; each is tested only once."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self._known: dict[Right, bool] = {}

    def has(self, right: str, table: sa.Table) -> bool:
        """Whether this user has the right on this table; always True on SQLite."""
        return self._has(Right(right, table_text(self._connection, table)), table)

    def lacking(self, role: Role, tables: Tables) -> tuple[Right, ...]:
        """The rights that this user lacks for that role."""
        needs = (
            (tables.outbox, role.outbox),
            (tables.inbox, role.inbox),
            (tables.order_lock, role.order_lock),
        )
        return tuple(right for table, names in needs for right in self.lacking_on(table, names))

    def lacking_on(self, table: sa.Table, names: Sequence[str]) -> Iterator[Right]:
        """Those of these rights that this user lacks on one table; none on SQLite."""
        on = table_text(self._connection, table)
        for name in names:
            if not self._has(Right(name, on), table):
                yield Right(name, on)
        if _INSERT in names and (sequence := self._denied_sequence(table)):
            yield Right("USAGE", f"SEQUENCE {sequence}")

    def _has(self, right: Right, table: sa.Table) -> bool:
        if right not in self._known:
            self._known[right] = _is_allowed(self._connection, right.name, table)
        return self._known[right]

    def _denied_sequence(self, table: sa.Table) -> str | None:
        """The sequence that this user may not use: PostgreSQL numbers rows by a separate object,
        unless the column is an identity.
        """
        number = table.autoincrement_column
        if self._connection.dialect.name != "postgresql" or number is None:
            return None
        values = {"name": table_text(self._connection, table), "column": number.name}
        sequence: str | None = self._connection.scalar(_DENIED_SEQUENCE, values)
        return sequence


_DENIED_SEQUENCE: Final = sa.text(
    "SELECT pg_get_serial_sequence(:name, :column) FROM pg_attribute "
    "WHERE attrelid = to_regclass(:name) AND attname = :column AND attidentity = '' "
    "AND NOT has_sequence_privilege(pg_get_serial_sequence(:name, :column), 'USAGE, UPDATE')"
)


def lacking_texts(connection: sa.Connection, role: Role, lacks: Iterable[Right]) -> list[str]:
    """The missing rights of this user for that role, with the GRANT; one text for each object."""
    return [
        f"{user(connection)} lacks a right that a {role.name} needs: {grant}"
        for grant in grants(connection, lacks)
    ]


def grants(connection: sa.Connection, rights: Iterable[Right]) -> Iterator[str]:
    """The statements that give these rights to the user of the connection, one for each object."""
    names: dict[str, list[str]] = {}
    for right in dict.fromkeys(rights):
        names.setdefault(right.on, []).append(right.name)
    for on, some in names.items():
        yield f"GRANT {', '.join(some)} ON {on} TO {user(connection)}"


def is_hidden(connection: sa.Connection, table: sa.Table) -> bool:
    """Whether the server may hide an existing table from this user. Requires: the table is not shown.

    MySQL shows a user only tables on which it has some right.
    """
    return connection.dialect.name in ("mysql", "mariadb") and not _is_allowed(
        connection, _SELECT, table
    )


def is_denied(error: sa.exc.DBAPIError) -> bool:
    """Whether a statement failed because of a missing right."""
    return error_code(error.orig) in (_POSTGRESQL, *_MYSQL)


def user(connection: sa.Connection) -> str:
    """The server's name of this user, quoted for statements."""
    if connection.dialect.name == "postgresql":
        return str(connection.exec_driver_sql("SELECT quote_ident(session_user)").scalar_one())
    whole: str = connection.exec_driver_sql("SELECT CURRENT_USER()").scalar_one()
    name, _, host = whole.rpartition("@")
    return f"'{name}'@'{host}'"


def _is_allowed(connection: sa.Connection, right: str, table: sa.Table) -> bool:
    if connection.dialect.name == "sqlite":
        return True
    try:
        with connection.begin_nested():
            connection.exec_driver_sql(f"EXPLAIN {_statement(connection, right, table)}").close()
    except sa.exc.DBAPIError as error:
        if error.connection_invalidated:
            raise
        # The server checks rights first; any other objection comes later.
        return not is_denied(error)
    return True


def _statement(connection: sa.Connection, right: str, table: sa.Table) -> str:
    """A statement that needs only this right, on the columns that QMQ writes."""
    name = table_sql(connection, table)
    match right:
        case "INSERT":
            number = table.autoincrement_column
            columns = [column.name for column in table.columns if column is not number]
            values = ", ".join(["NULL"] * len(columns))
            return f"INSERT INTO {name} ({', '.join(columns)}) VALUES ({values})"
        case "UPDATE":
            columns = [column for column in _CHANGED if column in table.c] or table.c.keys()
            changes = ", ".join(f"{column} = NULL" for column in columns)
            return f"UPDATE {name} SET {changes} WHERE 1 = 0"
        case "DELETE":
            return f"DELETE FROM {name} WHERE 1 = 0"
        case _:
            return f"SELECT {', '.join(table.c.keys())} FROM {name} WHERE 1 = 0"
