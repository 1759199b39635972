"""The port to what differs between databases for the inbox; one module per database behind it.

A further database is a module with a function `make_dialect` and a line in `_MODULES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Protocol

import sqlalchemy as sa

from qmq_client.errors import ConfigurationError

_MODULES: Final = {
    "mariadb": "qmq_client.inbox.mysql",
    "mysql": "qmq_client.inbox.mysql",
    "postgresql": "qmq_client.inbox.postgresql",
    "sqlite": "qmq_client.inbox.sqlite",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """The result of an insert."""

    #: Ids that were new.
    new: set[bytes]
    #: What the dialect needs again at `confirm`.
    mark: object = None


class InboxDialect(Protocol):
    """What the inbox needs to know about one kind of database.

    For an asynchronous engine each call happens inside SQLAlchemy's `run_sync`.
    """

    #: Execution options of a connection for a purge.
    purge_options: Mapping[str, Any]

    def begin(self, connection: sa.Connection) -> None:
        """Make sure that a transaction is open and may write.

        Raises `AutocommitError` if the connection would commit each statement by itself.
        """
        ...

    def insert(self, connection: sa.Connection, group: str, message_ids: Sequence[bytes]) -> Noted:
        """Note these ids, in a transaction that `confirm` will check; which of them are new.

        Waits for another transaction that is noting one of them. Raises `InboxRowLostError` for an
        id that is neither stored now nor was there before. Requires: at least one id, none twice,
        in ascending order, so that two transactions cannot deadlock.
        """
        ...

    def confirm(self, connection: sa.Connection, noted: Noted) -> None:
        """Raise `InboxTransactionError` unless the transaction of `insert` is still open.

        The database itself is asked, so it does not matter who ended it or how. Called once, before
        the commit. Raises `InboxRowLostError` for a new id that is not there, if `insert` could not
        know that.
        """
        ...

    def purge(
        self, connection: sa.Connection, group: str | None, *, older_than_ms: int, limit: int
    ) -> int:
        """Delete up to `limit` ids older than that by the database's clock; how many.

        Ids of one group, or the oldest of all. Any number of purges may run at once. An id that was
        deleted and noted anew in between is young, and stays.
        """
        ...


def inbox_dialect(engine: sa.Engine, inbox: sa.Table) -> InboxDialect:
    """The dialect for this engine's database; raises `ConfigurationError` for an unknown one."""
    name = engine.dialect.name
    module = _MODULES.get(name)
    if module is None:
        raise ConfigurationError(
            setting="inbox",
            value=f"a {name} database",
            remedy=f"The inbox knows {', '.join(sorted(_MODULES))}.",
        )
    make: Any = import_module(module).make_dialect
    dialect: InboxDialect = make(engine, inbox)
    return dialect
