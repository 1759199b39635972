"""What is known about one connection of the driver and its transaction.

Kept in the `info` of the pool's entry, so it is found in one step, outlives the many objects that
SQLAlchemy wraps around a driver's connection, and ends with that. A transaction that ends unseen
(by the driver's own `commit`, by the database) is recognized by having been open before; see
`was_open`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from weakref import ReferenceType, WeakSet, ref

import sqlalchemy as sa

from qmq_client.outbox.database.driver import unwrapped

_INFO_KEY: Final = "qmq_link"
#: Key in `info`. Missing means nothing was noted yet; None means nothing is to be noted.
_NOTHING: Final = object()
_links: WeakSet[Link] = WeakSet()


def _nobody() -> None:
    """Through whom nothing was sent."""


class Link:
    """One connection of the driver. Used by one thread at a time."""

    __slots__ = (
        "__weakref__",
        "connection",
        "driver",
        "is_begun",
        "is_begun_by_savepoint",
        "is_committing",
        "is_marking",
        "proxied",
        "unit",
        "was_open",
    )

    def __init__(self, proxied: Any) -> None:
        #: The driver's own connection, without wrappers.
        self.driver: Any = unwrapped(proxied)
        #: SQLAlchemy has begun a transaction, perhaps before the producer existed.
        self.is_begun = True
        #: The database began by a savepoint whose release will commit: SQLite in AUTOCOMMIT.
        self.is_begun_by_savepoint = False
        #: The driver was seen inside this transaction: if it is outside now, the transaction is over.
        self.was_open = False
        #: COMMIT has been sent, or the first of its two phases, and no transaction has begun since.
        self.is_committing = False
        #: SQLAlchemy is making, releasing or rolling back to a savepoint.
        self.is_marking = False
        #: The messages of this transaction (a `Unit`, which is opaque here), if any.
        self.unit: Any = None
        #: The connection through which they were sent; None once its owner is gone.
        self.connection: Callable[[], sa.Connection | None] = _nobody
        #: The pool's wrapper of it, a new one each time that it is given out.
        self.proxied: ReferenceType[Any] = ref(proxied)

    def begin(self, proxied: Any) -> None:
        """A transaction begins on what the pool gave out."""
        self.proxied = ref(proxied)
        self.is_committing = False
        if self.is_begun and self.unit is not None and not self.unit.is_lost:
            return  # two share one connection (a database in memory), and the other's goes on
        self.is_begun, self.was_open, self.unit = True, False, None
        self.is_begun_by_savepoint = False

    def end(self) -> Any:
        """The transaction is about to end; returns its messages, which then no longer belong to it."""
        unit, self.unit, self.is_begun = self.unit, None, False
        return unit


def find_link(proxied: Any) -> Link | None:
    """The link of a pool's connection; None if no transaction is followed, or none began yet."""
    try:
        found: Link | None = proxied.info.get(_INFO_KEY)
    except NotImplementedError:  # what stands in while the first connection is looked at
        return None
    return found


def make_link(proxied: Any) -> Link | None:
    """The same, created if missing; None for connections that are left out."""
    try:
        info = proxied.info
    except NotImplementedError:  # as above: SQLAlchemy's stand-in has no notes
        return None
    link: Any = info.get(_INFO_KEY, _NOTHING)
    if link is _NOTHING:
        link = info[_INFO_KEY] = Link(proxied)
        _links.add(link)
    found: Link | None = link
    return found


def link_of(connection: sa.Connection) -> Link:
    """The link of a connection in a transaction; a new one if the transaction is older than the producer.

    Raises SQLAlchemy's own error for a connection that is closed or invalidated.
    """
    proxied = connection.connection
    return find_link(proxied) or make_link(proxied) or Link(proxied)


def leave_out(entry: Any) -> None:
    """Do not follow the connection of this pool entry: it is our own."""
    entry.info[_INFO_KEY] = None


def all_links() -> list[Link]:
    """The links of all live connections; for a fork."""
    return list(_links)


def forget_all() -> None:
    """In a forked child: the links belong to the parent."""
    for link in all_links():
        link.unit = None
        link.is_begun = False
    _links.clear()
