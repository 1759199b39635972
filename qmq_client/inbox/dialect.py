"""The port to what differs between databases for the inbox; one module per database behind it.

A further database is a module with a function `make_dialect` and a line in `_MODULES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, Protocol

import sqlalchemy as sa

from qmq_client.errors import ConfigurationError

_MODULES: Final = {"sqlite": "qmq_client.inbox.sqlite"}


class InboxDialect(Protocol):
    """What the inbox needs to know about one kind of database."""

    def begin(self, connection: sa.Connection) -> None:
        """Make sure that a transaction is open which may write.

        Raises `AutocommitError` when the connection would commit each statement by itself.
        """
        ...

    def insert(
        self, connection: sa.Connection, group: str, message_ids: Sequence[bytes]
    ) -> set[bytes]:
        """Note these ids, in a transaction to be confirmed; which of them were not there before.

        Waits for another transaction that is noting one of them. Requires: no id twice.
        """
        ...

    def confirm(self, connection: sa.Connection) -> None:
        """Raise `InboxTransactionError` unless the transaction of `insert` is still open.

        Whoever ended it and however: the database itself says so. Once, before the commit.
        """
        ...

    def purge(
        self, connection: sa.Connection, group: str, *, older_than_ms: int, limit: int
    ) -> int:
        """Delete up to `limit` ids older than that by the database's clock; how many."""
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
