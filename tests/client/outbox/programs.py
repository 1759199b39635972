"""Random programs of an application: every way to open, nest, end and abuse a transaction.

A program is made from a seed, runs one transaction after the other on pooled connections, and in
each writes business rows and sends messages with the same labels. Nothing here predicts what the
database keeps: the oracle reads that afterwards from another connection.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.current import current_session
from qmq_client.errors import AutocommitError, NoTransactionError, OutboxError
from qmq_client.transactional import transaction, transactional
from tests.client.outbox.actions import AbandonError, Actions
from tests.client.outbox.faces import drive, new_registry, new_session, settled, within
from tests.client.outbox.hooks import hooked
from tests.client.outbox.interference import kill

JOIN_MODES: Final = ("conditional_savepoint", "rollback_only", "control_fully", "create_savepoint")
TRANSACTIONS_MAX: Final = 6
#: A cancelled program is cancelled at one of its first awaits, this many turns of the loop later.
CANCEL_AWAITS_MAX: Final = 40
CANCEL_TURNS_MAX: Final = 6
#: What ends a transaction and not the program.
SURVIVED: Final = (
    AbandonError,
    OutboxError,
    sa.exc.DBAPIError,
    sa.exc.InvalidRequestError,
    ConnectionError,  # of a killed session, which pg8000 does not make its own
)

Kind = Callable[[], Coroutine[Any, Any, None]]


def is_of_psycopg(error: AssertionError) -> bool:
    """Whether psycopg raised it, or SQLAlchemy over its result.

    So it ends an executemany that is cancelled while it begins, and an INSERT with RETURNING: psycopg takes the
    cancellation for an answer without rows.
    """
    frame, _ = list(traceback.walk_tb(error.__traceback__))[-1]
    module: str = frame.f_globals["__name__"]
    return module.partition(".")[0] == "psycopg" or module == "sqlalchemy.engine.cursor"


class Program(Actions):
    """Runs what its seed says; `trace` is what it did."""

    async def run(self, *, is_core: bool = False) -> None:
        """Some transactions, one after the other."""
        core: list[Kind] = [self.core_block, self.bare_connection, self.bare_connection]
        kinds = [*core, self.autocommit] if is_core else [*core, *self._session_kinds()]
        for _ in range(self.random.randint(1, TRANSACTIONS_MAX)):
            kind = self.random.choice(kinds)
            self.note(f"= {getattr(kind, '__name__', kind)}")
            if self.world.is_async and self.random.random() < 0.2:
                self.cancel_at = self.awaits + self.random.randint(1, CANCEL_AWAITS_MAX)
                self.cancel_turns = self.random.randint(0, CANCEL_TURNS_MAX)
            try:
                await kind()
            except (*SURVIVED, self.driver_error) as error:
                self.note(f"!{type(error).__name__}")
            except asyncio.CancelledError:
                self.note("!cancelled")
            except AssertionError as error:
                if not is_of_psycopg(error):
                    raise
                self.note("!AssertionError of psycopg")
            finally:
                self.fate.disarm()
                await self.let_cancellation_pass()

    @property
    def driver_error(self) -> type[Exception]:
        """SQLAlchemy lets it through where it asks a connection for AUTOCOMMIT that was killed."""
        error: type[Exception] = self.world.sync_engine.dialect.loaded_dbapi.Error
        return error

    def _session_kinds(self) -> list[Kind]:
        kinds: list[Kind] = [
            self.plain_session,
            self.plain_session,
            self.plain_session,
            self.scoped,
            self.decorated,
            self.decorated,
            self.joined_session,
            self.joined_session,
            self.hooked_session,
            self.hooked_session,
            self.autocommit,
        ]
        if self.world.kind != "sqlite":  # which has one writer
            kinds.append(self.interleaved)
            kinds += [] if self.world.is_async else [self.two_phase]
        return kinds

    # -- kinds of transactions

    async def plain_session(self) -> None:
        async with within(new_session(self.world)) as session:
            for _ in range(self.random.randint(1, 3)):  # one session, several transactions
                await self.work(session)
                await self.end_session(session)

    async def two_phase(self) -> None:
        async with within(new_session(self.world, twophase=True)) as session:
            # Where an error was swallowed, PostgreSQL answers PREPARE with a rollback, which psycopg
            # takes for prepared and is of no use afterwards: so it is plain.
            await self.work(session, is_plain=True)
            await self.end_session(session, ["commit", "commit", "rollback", "close", "raise"])

    async def scoped(self) -> None:
        key = object()
        registry = new_registry(self.world, lambda: key)
        try:
            await self.work(registry(), given=registry)
            await self.end_session(registry())
        finally:
            await self.do(registry.remove())

    async def interleaved(self) -> None:
        """Two sessions by turns."""
        async with (
            within(new_session(self.world)) as one,
            within(new_session(self.world)) as other,
        ):
            for _ in range(self.random.randint(1, 3)):
                await self.send_and_write(one)
                await self.send_and_write(other)
            first, second = (one, other) if self.random.random() < 0.5 else (other, one)
            for session in (first, second):
                ending = self.random.choice(["commit", "rollback", "close"])
                self.note(f"{'one' if session is one else 'other'} {ending}")
                if ending == "commit":
                    await self.do(session.flush())
                await self.do(getattr(session, ending)())

    async def hooked_session(self) -> None:
        """An event of the session, of a mapper or of the engine sends, too."""
        async with within(new_session(self.world)) as session:
            with hooked(self, session):
                await self.work(session)
                await self.end_session(session)

    async def decorated(self) -> None:
        # On SQLite two cannot write at once, so there is no second transaction inside.
        is_new = self.world.kind != "sqlite" and self.random.random() < 0.4
        self.note("requires_new" if is_new else "nested")

        async def inner() -> None:
            await self.send_and_write(current_session(), given=None)
            self.maybe_abandon()

        async def outer() -> None:
            await self.work(current_session(), given=None)
            with suppress(AbandonError):
                await self.decorate(inner, requires_new=is_new)()
            self.maybe_abandon()

        await self.decorate(outer)()

    def decorate(self, function: Callable[[], Any], **options: Any) -> Callable[[], Any]:
        """`@transactional` above a function of the world's kind."""
        if self.world.is_async:
            return transactional(self.world.producer, **options)(function)

        @transactional(self.world.producer, **options)
        def plain() -> None:
            drive(function())

        async def call() -> None:
            plain()

        return call

    async def joined_session(self) -> None:
        mode: Any = self.random.choice(JOIN_MODES)
        self.note(mode)
        async with within(self.world.engine.connect()) as connection:
            outer = await self.do(connection.begin())
            if self.random.random() < 0.3:
                await self.send_and_write(connection)
            session = new_session(self.world, connection, join_transaction_mode=mode)
            async with within(session):
                for _ in range(self.random.randint(1, 2)):
                    await self.work(session, is_joined=True)
                    await self.end_session(session, is_joined=True)
            if self.random.random() < 0.6 and outer.is_active:
                self.note("outer commit")
                await self.do(outer.commit())
            elif outer.is_active:
                self.note("outer rollback")
                await self.do(outer.rollback())

    async def core_block(self) -> None:
        async with within(transaction(self.world.engine)) as connection:
            await self.work(connection, given=self.random.choice([None, connection]))
            self.maybe_abandon()
            self.maybe_arm()

    async def bare_connection(self) -> None:
        async with within(self.world.engine.connect()) as connection:
            for _ in range(self.random.randint(1, 2)):
                await self.do(connection.begin())
                await self.work(connection)
                ending = self.random.choice(["commit"] * 3 + ["rollback", "close", "fail"])
                self.note(f"bare {ending}")
                if ending == "close":
                    return
                if ending == "fail":
                    await self.fail_the_commit(connection)
                    # SQLAlchemy gives a connection back as it is whose COMMIT has failed: on SQLite
                    # with the transaction open, and its lock held.
                    await self.do(connection.rollback())
                    return
                self.maybe_arm(ending)
                await self.do(getattr(connection, ending)())

    async def autocommit(self) -> None:
        """By three ways; a message would stay after a rollback, so all are refused."""
        way = self.random.choice(["engine", "connection", "execution"])
        self.note(way)
        options = {"isolation_level": "AUTOCOMMIT"}
        engine = self.world.engine.execution_options(**options) if way == "engine" else None
        async with within((engine or self.world.engine).connect()) as connection:
            if way == "connection":
                await settled(connection.execution_options(**options))
            if way == "execution":
                session = new_session(self.world, connection)
                await self.do(session.connection(execution_options=options))
            await self.do(connection.execute(sa.text("SELECT 1")))
            try:
                await self.send(self.new_labels(1), connection)
            except (AutocommitError, NoTransactionError):
                return
            raise AssertionError("a message was taken in AUTOCOMMIT")

    # -- how a transaction ends

    async def end_session(
        self, session: Any, endings: list[str] | None = None, *, is_joined: bool = False
    ) -> None:
        plain = ["commit"] * 5 + ["rollback", "close", "raise"]
        abused = ["fail", "behind", "behind_back", "text", "driver", "kill", "invalidate"]
        ending = self.random.choice(endings or [*plain, *([] if is_joined else abused)])
        self.note(ending)
        if ending == "raise":
            raise AbandonError
        if ending in ("fail", "behind", "behind_back", "text", "driver", "kill", "invalidate"):
            await getattr(self, f"_end_by_{ending.removesuffix('_back')}")(session, ending)
            await self.do(session.close())
            return
        # Closing a joined session drops what was not flushed but keeps what was: a send counts
        # as flushed, so the business rows must be, too, for the two to be compared.
        await self.do(session.flush())
        if endings is None and not is_joined:
            self.maybe_arm(ending)
        await self.do(getattr(session, ending)())

    async def _end_by_fail(self, session: Any, _: str) -> None:
        await self.fail_the_commit(session)
        await self.do(session.rollback())

    async def _end_by_behind(self, session: Any, ending: str) -> None:
        """Through the session's connection, past the session."""
        await self.do(session.flush())
        connection = await self.do(session.connection())
        if not connection.in_nested_transaction():
            await self.do(connection.commit() if ending == "behind" else connection.rollback())

    async def _end_by_text(self, session: Any, _: str) -> None:
        """By a statement given as text, and then perhaps as if nothing was."""
        await self.do(session.flush())
        statement = self.random.choice(["COMMIT", "ROLLBACK", "/* done */ commit"])
        self.note(statement)
        await self.do(session.execute(sa.text(statement)))
        self.is_ended_by_text = True
        try:
            if self.random.random() < 0.5:
                await self.send_and_write(session)
            await self.do(session.commit())
        finally:
            self.is_ended_by_text = False

    async def _end_by_driver(self, session: Any, _: str) -> None:
        """By the driver itself, of which nobody hears."""
        await self.do(session.flush())
        what = self.random.choice(["commit", "rollback"])
        self.note(what)
        await self.on_driver(session, what)
        if self.random.random() < 0.5:
            await self.send_and_write(session)
        await self.do(session.commit())

    async def _end_by_kill(self, session: Any, _: str) -> None:
        await self.do(session.flush())
        await self.on_connection(session, lambda connection: kill(self.world, connection))
        if self.random.random() < 0.5:
            await self.send_and_write(session)
        await self.do(session.commit())

    async def _end_by_invalidate(self, session: Any, _: str) -> None:
        await self.do(session.flush())
        await self.do(session.invalidate())
