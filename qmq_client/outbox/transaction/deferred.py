"""Messages of an asynchronous session that has not begun on its database yet.

`producer.send` is an ordinary function: outside SQLAlchemy's greenlet it can execute nothing, not
even a BEGIN. (Inside, as in a listener, it does: there a commit may be under way that would not
look again.) So messages sent before the session's first statement are noted at the session's
innermost transaction. They move into the connection's unit when that transaction begins there: with
its first statement, or right before its commit. A transaction that is rolled back takes its notes
with it. What a signal handler raises in the middle leaves the rest waiting, for the commit at the
latest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session, SessionTransaction

from qmq_client.outbox.row import Ending, OutboxRow
from qmq_client.outbox.transaction.opened import checked_unit
from qmq_client.outbox.transaction.outlet import Outlet

#: Set in `session.info` once something was deferred; blocking sessions never need it.
DEFERRED: Final = "qmq_deferred"
#: SQLAlchemy's class.
_GREENLET: Final = "_AsyncIoGreenlet"


@dataclass(slots=True, eq=False)
class _Deferred:
    transaction: SessionTransaction
    engine: sa.Engine
    outlet: Outlet
    rows: list[OutboxRow]
    #: As those of a `Unit`.
    endings: list[Ending] = field(default_factory=list)
    #: Some of the rows may be in the unit, if the move was interrupted.
    is_moving: bool = False

    def find(self, outlet: Outlet, message_id: bytes) -> tuple[OutboxRow, Ending] | None:
        rows = self.rows if self.outlet is outlet else []
        found = next((row for row in rows if row.message_id == message_id), None)
        if found is None:
            return None
        ending = Ending()
        self.endings.append(ending)
        return found, ending


def can_execute_async() -> bool:
    """Whether this code is in the greenlet of an asynchronous engine, as in `run_sync` or in a listener."""
    from greenlet import getcurrent  # late: only an asynchronous engine brings it

    # By its name: a function for this question came only within SQLAlchemy 2.0.
    return type(getcurrent()).__name__ == _GREENLET


def defer(session: Session, engine: sa.Engine, outlet: Outlet, rows: list[OutboxRow]) -> None:
    """Note rows until the innermost transaction of this session begins on `engine`."""
    transaction = session.get_nested_transaction() or session.get_transaction()
    if transaction is None:
        transaction = session.begin()  # what any other first use of the session does; no I/O
    session.info.setdefault(DEFERRED, []).append(_Deferred(transaction, engine, outlet, rows))


def move(session: Session, transaction: SessionTransaction, connection: sa.Connection) -> None:
    """`transaction` has begun on this connection: its waiting messages go into the connection's unit."""
    waiting: list[_Deferred] = session.info.get(DEFERRED, [])
    pool = connection.engine.pool
    for each in waiting.copy():
        if each.transaction is not transaction or each.engine.pool is not pool:
            continue
        unit = checked_unit(connection, each.outlet)
        unit.endings += tuple(each.endings)
        rows = unit.without_known(each.rows) if each.is_moving else each.rows
        each.is_moving = True
        unit.add(connection, each.outlet, rows)
        waiting.remove(each)  # last: whatever is raised before, it still waits


def deferred_outboxes(session: Session) -> dict[sa.Engine, sa.Table]:
    """The outboxes for which messages wait until a transaction begins on their engines.

    Not only the innermost: a transaction may be committed around a savepoint that was left open.
    """
    waiting: list[_Deferred] = session.info.get(DEFERRED, [])
    return {each.engine: each.outlet.outbox for each in waiting}


def deferred_row(
    session: Session, outlet: Outlet, message_id: bytes
) -> tuple[OutboxRow, Ending] | None:
    """The note of a message that waits for its transaction to begin."""
    waiting: list[_Deferred] = session.info.get(DEFERRED, [])
    found = (each.find(outlet, message_id) for each in waiting)
    return next((each for each in found if each is not None), None)


def drop(session: Session, transaction: SessionTransaction) -> None:
    """`transaction` is over; what still waits for it was rolled back with it."""
    waiting: list[_Deferred] = session.info.get(DEFERRED, [])
    waiting[:] = [each for each in waiting if each.transaction is not transaction]
