"""Finds the session or connection that a send joins: named or scoped, never guessed.

`session=` names it. Without it, the innermost `@transactional`, `transaction` or inbox handler
around the code is used, or the producer's source of sessions (`Producer(…, session=db.session)`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.current import current_scopes, sync_of
from qmq_client.errors import ConfigurationError, NoTransactionError, WrongDatabaseError
from qmq_client.given import session_of
from qmq_client.outbox.sending.insert import closed_error
from qmq_client.outbox.sending.notes import begun_connections

_NOT_NAMED: Final = (
    "which transaction? Pass `session=`: the Session or AsyncSession that this code writes with, or a "
    "Connection. It may be left out inside @transactional, `transaction(engine)` and inbox handlers, and "
    "when the producer was given the application's: Producer(…, session=db.session). `send_now` has a "
    "transaction of its own"
)


class Scopes:
    """Finds the session or connection for one producer."""

    def __init__(
        self,
        engine: sa.Engine,
        outbox: sa.Table,
        default: Callable[[], Any] | None,
        *,
        is_strict: bool = False,
    ) -> None:
        """`default`: returns the session; `is_strict`: refuse sessions on several databases."""
        self._engine = engine
        self._outbox = outbox
        self._default = default
        self._is_strict = is_strict

    def find(self, given: Any) -> Any:
        """The object whose transaction the send joins: the given one, or the scoped one; resolves registries.

        A `Session`, `AsyncSession`, `Connection` or `AsyncConnection`. Raises `NoTransactionError`
        if none was passed and none is scoped; `ConfigurationError` for another kind of object.
        """
        if isinstance(given, Session | sa.Connection):
            return given
        scope = self._scoped() if given is None else session_of(given)
        if isinstance(sync_of(scope), Session | sa.Connection):
            return scope
        raise ConfigurationError(
            setting="session",
            value=type(scope).__name__,
            remedy="Give a Session, scoped_session, AsyncSession or a Connection that is in a transaction.",
        )

    def has_scope(self) -> bool:
        """Whether a call without `session=` would find one."""
        is_scoped = any(self._is_ours(sync_of(each)) for each in current_scopes())
        return is_scoped or self._default is not None

    def connection(self, scope: Session | sa.Connection) -> tuple[sa.Connection, bool]:
        """The connection on which this scope writes to the outbox, in its transaction; and whether it is
        the application's own, which may outlive the scope.

        A session without a transaction begins one. Raises `WrongDatabaseError` for another database,
        `NoTransactionError` for a connection that is not in a transaction.
        """
        if isinstance(scope, Session):
            return self._of_session(scope)
        if not self._is_ours(scope):
            raise self._wrong()
        if not scope.in_transaction():
            raise NoTransactionError(
                "this connection is not in a transaction. Use `with transaction(engine) as connection`,"
                " or `with connection.begin()`"
            )
        return scope, True

    def _of_session(self, session: Session) -> tuple[sa.Connection, bool]:
        bind = self.bind_of(session)
        try:
            connection = session.connection(bind_arguments={"bind": bind})
        except sa.exc.MissingGreenlet:
            raise  # is an InvalidRequestError, too
        except sa.exc.InvalidRequestError as error:
            raise closed_error(error) from error
        if self._is_strict:
            self._refuse_second_connection(session, connection)
        if not connection.in_transaction():
            raise NoTransactionError(
                "the session's connection was committed or rolled back directly; close the session, or "
                "commit and roll back through it"
            )
        return connection, isinstance(bind, sa.Connection)

    def bind_of(self, session: Session) -> sa.Engine | sa.Connection:
        """The bind on which the session would write to the outbox, so that the send joins the same transaction.

        The session decides: it may be bound to a connection, or to an engine with its own options.
        A session on several databases may have another default; then it counts whether its
        transaction has begun on this one.
        """
        if session.bind is self._engine and type(session).get_bind is Session.get_bind:
            return self._engine  # as `get_bind` would say below, in a tenth of its time
        bind: sa.Engine | sa.Connection
        # The second call is for a `get_bind` that recognizes only UPDATE and DELETE, like the
        # recipe in SQLAlchemy's documentation.
        for clause in (None, sa.insert(self._outbox), sa.update(self._outbox)):
            with suppress(sa.exc.UnboundExecutionError):
                bind = session.get_bind() if clause is None else session.get_bind(clause=clause)
                if self._is_ours(bind):
                    return bind
        for begun in begun_connections(session):
            if self._is_ours(begun):
                return begun
        raise self._wrong()

    def _scoped(self) -> Any:
        for scope in reversed(current_scopes()):
            sync = sync_of(scope)
            if self._is_ours(sync):
                if sync.in_transaction():
                    return scope
                raise NoTransactionError(
                    "the transaction around this code has ended: it was committed or rolled back in it, or a "
                    "task has outlived it. Send before that, or in a separate transaction"
                )
        if self._default is None:
            raise NoTransactionError(_NOT_NAMED)
        return session_of(self._default())

    def _is_ours(self, scope: Any) -> bool:
        """Whether a session, connection or engine leads to the producer's database."""
        if isinstance(scope, Session):
            with suppress(WrongDatabaseError):
                self.bind_of(scope)
                return True
            return False
        with suppress(sa.exc.InvalidRequestError):  # a closed connection
            return bool(scope.engine.pool is self._engine.pool)
        return False

    def _refuse_second_connection(self, session: Session, connection: sa.Connection) -> None:
        for begun in begun_connections(session):
            if begun is connection:
                continue
            where = "connection to the same database"
            if not self._is_ours(begun):
                where = f"engine ({begun.engine.url.render_as_string(hide_password=True)})"
            raise WrongDatabaseError(
                f"this session's transaction has also begun on another {where}: the two commits are not "
                "one, so `strict` refuses to send in it. Use a separate session for the other one"
            )

    def _wrong(self) -> WrongDatabaseError:
        outbox = self._outbox.fullname
        url = self._engine.url.render_as_string(hide_password=True)
        return WrongDatabaseError(
            f"the transaction runs on another engine than this producer's outbox ({url}), so they would "
            "not commit together. Use a session on the producer's engine, or a producer for this one; in a "
            f"session with several, name the table {outbox} in `binds`, or have `get_bind` choose for it"
        )
