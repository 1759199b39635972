"""The inbox's statements, which are nearly the same on all databases; one module for each database.

Statements are text with parameters, through SQLAlchemy alone, so they run on every driver. Each names
the table with its schema: a handler may change `search_path`, the current database or the role, or
create a temporary table with the same name.

A further database is a module with a function `make_dialect` and a line in `_MODULES`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.errors import (
    AutocommitError,
    ConfigurationError,
    InboxRowLostError,
    InboxTransactionError,
)
from qmq_client.outbox.database.autocommit import is_autocommit
from qmq_client.outbox.database.placeholders import placeholders

_MODULES: Final = {
    "mariadb": "qmq_client.inbox.mysql",
    "mysql": "qmq_client.inbox.mysql",
    "postgresql": "qmq_client.inbox.postgresql",
    "sqlite": "qmq_client.inbox.sqlite",
}
#: Far below every database's limit of parameters, and, at 16 bytes each written as text, below the
#: smallest `max_allowed_packet` of MySQL.
IDS_PER_STATEMENT_MAX: Final = 500
_IDS_TOLD: Final = 3
_SAVEPOINT: Final = "qmq_inbox"


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """The result of an insert."""

    #: The new ids.
    new: set[bytes]
    #: The dialect's value for `confirm`.
    mark: object = None


class InboxDialect(ABC):
    """The inbox's statements on one kind of database.

    For an asynchronous engine each call happens inside SQLAlchemy's `run_sync`.
    """

    #: SQL text: milliseconds since 1970 UTC by the database's clock.
    now_ms: str
    #: Execution options of a connection for a purge.
    purge_options: Mapping[str, Any] = {"isolation_level": "READ COMMITTED"}

    def __init__(self, engine: sa.Engine, inbox: sa.Table) -> None:
        self._dialect = engine.dialect
        self._inbox = inbox
        self._insert_sql = lru_cache(maxsize=IDS_PER_STATEMENT_MAX)(self._make_insert)
        self._find_sql = lru_cache(maxsize=IDS_PER_STATEMENT_MAX)(self._make_find)

    @cached_property
    def table(self) -> sa.Table:
        """The table with its schema: its own, or the one in which the engine's connections begin.

        Requires: the engine has connected.
        """
        if self._inbox.schema is not None or (schema := self._first_schema()) is None:
            return self._inbox
        return self._inbox.to_metadata(sa.MetaData(), schema=schema)

    def _first_schema(self) -> str | None:
        return self._dialect.default_schema_name

    @cached_property
    def name(self) -> str:
        """The quoted name of the table, for statements."""
        return self._dialect.identifier_preparer.format_table(self.table)

    def begin(self, connection: sa.Connection) -> None:
        """Make sure that a transaction is open and may write.

        Raises `AutocommitError` if the connection would commit each statement by itself.
        """
        if is_autocommit(connection):
            raise AutocommitError(
                "the inbox's connection commits every statement by itself; "
                "remove isolation_level='AUTOCOMMIT' from its engine"
            )

    @abstractmethod
    def insert(self, connection: sa.Connection, group: str, message_ids: Sequence[bytes]) -> Noted:
        """Insert these ids, in a transaction that `confirm` will check; returns the new ones.

        Waits for another transaction that is inserting one of them. Raises `InboxRowLostError` for
        an id that is neither stored now nor was known before. Requires: at least one id, none
        twice, in ascending order, so that two transactions cannot deadlock.
        """

    def confirm(self, connection: sa.Connection, group: str, noted: Noted) -> None:
        """Raise `InboxTransactionError` unless the transaction of `insert` is still open.

        It queries the database, so it detects every way of ending the transaction. Called once,
        before the commit. Raises `InboxRowLostError` for a new id that is missing, if `insert`
        could not detect that.
        """
        try:
            connection.exec_driver_sql(f"RELEASE SAVEPOINT {_SAVEPOINT}")
        except sa.exc.DBAPIError as error:
            if error.connection_invalidated:
                raise
            raise InboxTransactionError from error

    def forget(self, connection: sa.Connection, group: str, message_ids: Collection[bytes]) -> None:
        """Delete ids of this transaction, so that their messages may have effects again.

        Raises `InboxRowLostError` if another table was found in place of the inbox.
        """
        for ids in in_statements(sorted(message_ids)):
            sql = f"DELETE FROM {self.name} {self.where(len(ids))}"
            if connection.exec_driver_sql(sql, (group, *ids)).rowcount != len(ids):
                raise self.refuse(ids)

    @abstractmethod
    def purge(
        self, connection: sa.Connection, group: str | None, *, older_than_ms: int, limit: int
    ) -> int:
        """Delete up to `limit` ids older than that by the database's clock; returns how many.

        Ids of one group, or the oldest of all. Any number of purges may run at once. An id that was
        deleted and inserted again in between is young, and stays.
        """

    def undo_failed_commit(self, connection: sa.Connection) -> None:  # noqa: B027  # of SQLite alone
        """End the transaction if the database keeps it open after a failed COMMIT."""

    def set_savepoint(self, connection: sa.Connection) -> None:
        """Set a savepoint before the handler's part; any COMMIT or ROLLBACK removes it."""
        connection.exec_driver_sql(f"SAVEPOINT {_SAVEPOINT}")

    def known(
        self, connection: sa.Connection, group: str, ids: Sequence[bytes], ending: str = ""
    ) -> set[bytes]:
        """The known ones of these ids. `ending`: SQL text after the query."""
        found = connection.exec_driver_sql(self._find_sql(len(ids)) + ending, (group, *ids))
        return {bytes(row[0]) for row in found}  # some drivers return a view

    def check_known(
        self, connection: sa.Connection, group: str, ids: Sequence[bytes], ending: str = ""
    ) -> None:
        """Raise `InboxRowLostError` for missing ids: a trigger dropped or altered them."""
        known = self.known(connection, group, ids, ending)
        if lost := [one for one in ids if one not in known]:
            raise self.refuse(lost)

    def refuse(self, message_ids: Sequence[bytes]) -> InboxRowLostError:
        """The error for ids that are missing although the database accepted their INSERT."""
        some = " or ".join(message_id.hex() for message_id in message_ids[:_IDS_TOLD])
        more = ", …" if len(message_ids) > _IDS_TOLD else ""
        return InboxRowLostError(table=self.name, message_ids=some + more)

    def run_insert(
        self, connection: sa.Connection, group: str, ids: Sequence[bytes], ending: str = ""
    ) -> Sequence[Any]:
        """Insert these ids by one statement; returns its rows. `ending`: SQL text after it."""
        values = tuple(value for message_id in ids for value in (group, message_id))
        done = connection.exec_driver_sql(self._insert_sql(len(ids)) + ending, values)
        return done.all() if done.returns_rows else []

    def old(
        self, columns: str, group: str | None, older_than_ms: int, limit: int
    ) -> tuple[str, tuple[str, ...]]:
        """A query for the oldest ids, and its parameters."""
        of_group = ""
        if group is not None:
            of_group = f"AND consumer_group = {next(placeholders(self._dialect))} "
        text = (
            f"SELECT {columns} FROM {self.name} "
            f"WHERE received_at_ms < {self.now_ms} - {older_than_ms:d} "
            f"{of_group}ORDER BY received_at_ms LIMIT {limit:d}"
        )
        return text, () if group is None else (group,)

    def _make_insert(self, count: int) -> str:
        places = placeholders(self._dialect)
        rows = ", ".join(f"({next(places)}, {next(places)}, {self.now_ms})" for _ in range(count))
        return f"INSERT INTO {self.name} (consumer_group, message_id, received_at_ms) VALUES {rows}"

    def _make_find(self, count: int) -> str:
        return f"SELECT message_id FROM {self.name} {self.where(count)}"

    def where(self, count: int) -> str:
        """The condition for the rows of this many ids; its parameters are the group and the ids."""
        places = placeholders(self._dialect)
        of_group = next(places)
        ids = ", ".join(next(places) for _ in range(count))
        return f"WHERE consumer_group = {of_group} AND message_id IN ({ids})"


def in_statements(message_ids: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """The ids in portions, one for each statement."""
    for first in range(0, len(message_ids), IDS_PER_STATEMENT_MAX):
        yield message_ids[first : first + IDS_PER_STATEMENT_MAX]


def inbox_dialect(engine: sa.Engine, inbox: sa.Table) -> InboxDialect:
    """The dialect for this engine's database; raises `ConfigurationError` for an unknown one."""
    name = engine.dialect.name
    module = _MODULES.get(name)
    if module is None:
        raise ConfigurationError(
            setting="inbox",
            value=f"a {name} database",
            remedy=f"Use one that the inbox works with: {', '.join(sorted(_MODULES))}.",
        )
    make: Any = import_module(module).make_dialect
    dialect: InboxDialect = make(engine, inbox)
    return dialect
