"""Stands between SQLAlchemy and the driver: sees every BEGIN, SAVEPOINT, ROLLBACK, COMMIT and statement.

Sessions, connections and pools all call SQLAlchemy's dialect for these. So the dialect of a
followed engine gets methods that do our part and then call the original method. Here a COMMIT has a
before and an after: if the call returned, it has happened; if it raised, it may have.

Events of the engine would report the same, one by one and before the fact, and would cost each
transaction of the application more than all of this; see
`docs/decisions/0015-calls-of-the-dialect.md`.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.sql.elements import (
    ReleaseSavepointClause,
    RollbackToSavepointClause,
    SavepointClause,
)

from qmq_client.outbox.database.dialect import OutboxDialect
from qmq_client.outbox.database.link import Link, find_link, link_of, make_link
from qmq_client.outbox.transaction.unit import Unit

_log = logging.getLogger("qmq.outbox")
#: What SQLAlchemy executes for the dialect's savepoints; an application may execute it as well.
_SAVEPOINT_CLAUSES: Final = (
    SavepointClause,
    RollbackToSavepointClause,
    ReleaseSavepointClause,
)
_METHODS: Final = (
    "do_begin",
    "do_commit",
    "do_rollback",
    "do_begin_twophase",
    "do_prepare_twophase",
    "do_commit_twophase",
    "do_rollback_twophase",
    "do_savepoint",
    "do_rollback_to_savepoint",
    "do_release_savepoint",
    "do_execute",
    "do_executemany",
    "do_execute_no_params",
    "is_disconnect",
)
#: Marks a dialect that this copy of the product follows.
_MARK: Final = f"followed by {__name__}"


def follow(dialect: Any, outbox: OutboxDialect) -> bool:
    """Follow this dialect from now on; False if it is followed already, by whatever thread."""
    calls = Calls(dialect, outbox)
    if vars(dialect).setdefault(_MARK, calls) is not calls:
        return False
    for name in _METHODS:
        setattr(dialect, name, getattr(calls, name))
    return True


def is_followed(dialect: Any) -> bool:
    """Whether `follow` was called for it."""
    return _MARK in vars(dialect)


class Calls:
    """The methods of one dialect, as SQLAlchemy knows them (`sqlalchemy.engine.Dialect`).

    `proxied` is the pool's wrapper of a driver's connection.
    """

    def __init__(self, dialect: Any, outbox: OutboxDialect) -> None:
        self._outbox = outbox
        self._idle_rollbacks = outbox.idle_rollbacks
        #: The original methods; `qmq doctor` counts how many layers there are.
        self.followed: dict[str, Any] = {name: getattr(dialect, name) for name in _METHODS}
        self._begin = dialect.do_begin
        self._commit = dialect.do_commit
        self._rollback = dialect.do_rollback
        self._execute = dialect.do_execute
        self._executemany = dialect.do_executemany
        self._execute_no_params = dialect.do_execute_no_params

    def do_begin(self, proxied: Any) -> None:
        link = find_link(proxied) or make_link(proxied)
        if link is not None:
            link.begin(proxied)
        self._begin(proxied)

    def do_commit(self, proxied: Any) -> None:
        link = find_link(proxied)
        if link is None:
            self._commit(proxied)
            return
        unit: Unit | None = link.unit
        if unit is not None:
            try:  # what `_finish` does, and a call less: most transactions end here
                unit.finish(link.connection())
            except BaseException:
                self._give_up(link, proxied)
                raise
            link.unit = None  # what is executed from here on is the COMMIT
            if unit.endings:
                unit.note_commit()
        link.is_committing = True
        try:
            self._commit(proxied)
        except BaseException:
            if unit is not None:
                unit.hand_over(is_confirmed=False)
            raise
        link.is_begun = False
        if self._idle_rollbacks is not None:
            self._idle_rollbacks.note_commit(link)
        if unit is not None:
            unit.hand_over(is_confirmed=True)

    def do_rollback(self, proxied: Any) -> None:
        """A pool also calls it behind each COMMIT; MySQL's driver would then make a round trip each time."""
        link = find_link(proxied)
        if link is None:
            self._rollback(proxied)
            return
        if link.is_begun or link.unit is not None:
            _drop(link)
        if self._idle_rollbacks is None or not self._idle_rollbacks.is_at_rest(link):
            self._rollback(proxied)

    def do_begin_twophase(self, connection: sa.Connection, xid: Any) -> None:
        proxied = connection.connection
        link = make_link(proxied)
        if link is not None:
            link.begin(proxied)
        self.followed["do_begin_twophase"](connection, xid)

    def do_prepare_twophase(self, connection: sa.Connection, xid: Any) -> None:
        link = find_link(connection.connection)
        if link is not None:
            if link.unit is not None:
                self._finish(link, connection.connection)
                link.unit.is_ending = True
            link.is_committing = True
        self.followed["do_prepare_twophase"](connection, xid)

    def do_commit_twophase(
        self, connection: sa.Connection, xid: Any, is_prepared: bool = True, recover: bool = False
    ) -> None:
        commit = self.followed["do_commit_twophase"]
        link = find_link(connection.connection)
        if link is None:
            commit(connection, xid, is_prepared, recover)
            return
        unit: Unit | None = link.unit
        if is_prepared:
            link.end()
        elif unit is not None:
            self._finish(link, connection.connection)
            link.unit = None
        if unit is not None:
            unit.note_commit()
        link.is_committing = True
        try:
            commit(connection, xid, is_prepared, recover)
        except BaseException:
            if unit is not None:
                unit.hand_over(is_confirmed=False)
            raise
        link.is_begun = False
        if unit is not None:
            unit.hand_over(is_confirmed=True)

    def do_rollback_twophase(
        self, connection: sa.Connection, xid: Any, is_prepared: bool = True, recover: bool = False
    ) -> None:
        link = find_link(connection.connection)
        if link is not None:
            link.end()
        self.followed["do_rollback_twophase"](connection, xid, is_prepared, recover)

    def do_savepoint(self, connection: sa.Connection, name: str) -> None:
        if (unit := self._mark("do_savepoint", connection, name)) is not None:
            unit.on_savepoint(name)

    def do_rollback_to_savepoint(self, connection: sa.Connection, name: str) -> None:
        if (unit := self._mark("do_rollback_to_savepoint", connection, name)) is not None:
            unit.on_savepoint_end(name, is_undone=True)

    def do_release_savepoint(self, connection: sa.Connection, name: str) -> None:
        if (unit := self._mark("do_release_savepoint", connection, name)) is not None:
            unit.on_savepoint_end(name, is_undone=False)

    def _mark(self, method: str, connection: sa.Connection, name: str) -> Unit | None:
        """The savepoint as SQLAlchemy wants it, noted by the unit, if there is one."""
        link = link_of(connection)
        link.is_marking = True
        try:
            self.followed[method](connection, name)
        finally:
            link.is_marking = False
        unit: Unit | None = link.unit
        return unit

    def do_execute(self, cursor: Any, statement: str, parameters: Any, context: Any = None) -> None:
        link = self._before(cursor, statement, context)
        try:
            self._execute(cursor, statement, parameters, context)
        except BaseException:
            _on_failed(link, statement)
            raise
        if link is not None and not link.was_open:
            self._outbox.note_answer(link, statement)

    def do_executemany(
        self, cursor: Any, statement: str, parameters: Any, context: Any = None
    ) -> None:
        link = self._before(cursor, statement, context)
        self._executemany(cursor, statement, parameters, context)
        if link is not None and not link.was_open:
            self._outbox.note_answer(link, statement)

    def do_execute_no_params(self, cursor: Any, statement: str, context: Any = None) -> None:
        link = self._before(cursor, statement, context)
        try:
            self._execute_no_params(cursor, statement, context)
        except BaseException:
            _on_failed(link, statement)
            raise
        if link is not None and not link.was_open:
            self._outbox.note_answer(link, statement)

    def _before(self, cursor: Any, statement: str, context: Any) -> Link | None:
        """A statement is about to be executed; the link of its connection, if it is followed."""
        if context is None:
            return None
        connection = context.root_connection
        link = find_link(connection.connection)
        if link is None:
            return None
        if not link.was_open:
            self._outbox.before_statement(connection, link, cursor, statement)
        if link.unit is not None and not (link.is_marking and _is_savepoint(context)):
            link.unit.on_statement(connection, statement)
        return link

    def is_disconnect(self, error: Any, proxied: Any, cursor: Any) -> bool:
        """Asked about each error of the driver, and before any listener, which may keep it from the next one."""
        is_disconnect: bool = self.followed["is_disconnect"](error, proxied, cursor)
        # Of a connection that is being made or tried, SQLAlchemy has only the driver's own.
        link = find_link(proxied) if isinstance(proxied, sa.PoolProxiedConnection) else None
        if link is not None:
            note_error(self._outbox, link, error, is_disconnect=is_disconnect)
        return is_disconnect

    def _finish(self, link: Link, proxied: Any) -> None:
        """Write the waiting rows. An error here stops the COMMIT."""
        try:
            link.unit.finish(link.connection())
        except BaseException:
            self._give_up(link, proxied)
            raise

    def _give_up(self, link: Link, proxied: Any) -> None:
        """The waiting rows could not be written: end the transaction.

        SQLAlchemy takes a failed commit for the end of the transaction and sends no ROLLBACK. A
        failure here must not hide the error, or the cancellation, that is being raised.
        """
        connection = link.connection()
        link.end()
        if connection is not None and not connection.invalidated:
            with suppress(Exception):
                self._rollback(proxied)


def note_error(
    outbox: OutboxDialect, link: Link, error: BaseException | None, *, is_disconnect: bool
) -> None:
    """Something failed on this connection; whether the application minds is not known here. Safe to repeat."""
    if link.unit is not None:
        link.unit.on_error(error, is_disconnect=is_disconnect)
    elif link.is_begun and not is_disconnect:
        is_autocommit = not outbox.is_transactional(link)
        has_ended = not is_autocommit and not outbox.is_in_transaction(link)
        if has_ended or outbox.undoes_transaction(link, error):
            # Nothing was sent yet; messages sent later must not be taken for all there are.
            link.unit = Unit(link, is_lost=True)


def _on_failed(link: Link | None, statement: str) -> None:
    if link is not None and link.unit is not None:
        link.unit.on_failed(statement)


def _drop(link: Link) -> None:
    """A transaction is rolled back, and its messages with it."""
    unit: Unit | None = link.end()
    connection = link.connection()
    if unit is None or connection is None or connection.invalidated:
        return
    if unit.was_ended_elsewhere():
        _log.error(
            "%s was not stored: its transaction was ended by the driver's own connection, "
            "perhaps by a commit. Commit and roll back through SQLAlchemy.",
            unit.names(),
        )


def _is_savepoint(context: Any) -> bool:
    """Excludes other statements, perhaps of a listener, in the middle of a savepoint."""
    compiled = getattr(context, "compiled", None)
    return compiled is not None and isinstance(compiled.statement, _SAVEPOINT_CLAUSES)
