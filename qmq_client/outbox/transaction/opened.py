"""The unit of a connection's transaction: an existing one, or a new one for a send."""

from __future__ import annotations

from weakref import ref

import sqlalchemy as sa

from qmq_client.errors import AutocommitError, NoTransactionError
from qmq_client.outbox.database.link import Link, find_link, link_of
from qmq_client.outbox.transaction.outlet import Outlet
from qmq_client.outbox.transaction.unit import Unit, lost_error


def unit_of(connection: sa.Connection) -> Unit | None:
    """The unit of this connection's current transaction; None if nothing was sent in it."""
    link = known_link(connection)
    unit: Unit | None = None if link is None else link.unit
    return unit


def checked_unit(connection: sa.Connection, outlet: Outlet) -> Unit:
    """The unit that a send joins; raises `OutboxError` if it could not follow the transaction."""
    link = find_link(connection.connection) or link_of(connection)
    if link.is_committing:
        raise NoTransactionError(
            "the transaction is prepared, or being committed by another thread; send before that"
        )
    dialect = outlet.dialect
    unit: Unit | None = link.unit
    if unit is None:
        was_open = link.was_open
        if not dialect.is_transactional(link):
            raise AutocommitError(
                "this connection is in AUTOCOMMIT: it commits every statement by itself, so the "
                "message would stay after a rollback. Use an engine without AUTOCOMMIT, or "
                "`send_now`, which has a transaction of its own"
            )
        if was_open and not dialect.is_in_transaction(link):
            raise lost_error("this message")
        link.connection = ref(
            connection
        )  # first: a unit that was left without could not be written
        unit = link.unit = Unit(link)
    elif unit.is_lost or not dialect.is_in_transaction(link):
        # A note made now would be missing if something else commits before the error appears.
        unit.is_lost = True
        raise lost_error("this message")
    return unit


def known_link(connection: sa.Connection) -> Link | None:
    """The link of a connection in which something may have been noted."""
    # `Connection.connection` raises for a closed connection, and makes a new one for an invalidated
    # one.
    proxied = connection._dbapi_connection
    return None if proxied is None else find_link(proxied)
