"""Random programs against the session tracker: every way to open, nest, end and abuse a transaction.

A program is made from a seed, runs one transaction after the other on one pooled connection, and in
each writes business rows and sends messages with the same labels. Nothing here predicts what the
database keeps: the oracle reads that afterwards from another connection.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from qmq_client.message import Message
from qmq_client.transactional import transaction, transactional
from tests.client.world import SUBJECT, Order, World

JOIN_MODES: Final = ("conditional_savepoint", "rollback_only", "control_fully", "create_savepoint")
NESTED_MAX: Final = 3
NO_SUCH_ORDER: Final = 10**9


class AbandonError(Exception):
    """The application's own error, which leaves a block."""


class Program:
    """Runs what its seed says; `trace` is what it did."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.trace: list[str] = []
        self.labels: dict[str, str] = {}

    def run(self) -> None:
        """Some transactions, one after the other."""
        kinds: list[Callable[[], None]] = [
            self.plain_session,
            self.plain_session,
            self.scoped,
            self.decorated,
            self.joined_session,
            self.core_block,
            self.bare_connection,
        ]
        for _ in range(self.random.randint(1, 6)):
            kind = self.random.choice(kinds)
            self.note(f"= {kind.__name__}")
            with suppress(AbandonError, sa.exc.DatabaseError):
                kind()

    def note(self, text: str) -> None:
        self.trace.append(text)

    # -- kinds of transactions

    def plain_session(self) -> None:
        with Session(self.world.engine) as session:
            for _ in range(self.random.randint(1, 3)):  # one session, several transactions
                self.work(session)
                self.end_session(session)

    def scoped(self) -> None:
        registry = scoped_session(sessionmaker(self.world.engine))
        try:
            self.work(registry(), given=registry)
            self.end_session(registry())
        finally:
            registry.remove()

    def decorated(self) -> None:
        @transactional(self.world.producer)
        def inner() -> None:
            self.send_and_write(self.current(), given=None)
            self.maybe_abandon()

        @transactional(self.world.producer)
        def outer() -> None:
            self.work(self.current(), given=None)
            with suppress(AbandonError):
                inner()
            self.maybe_abandon()

        outer()

    def joined_session(self) -> None:
        mode: Any = self.random.choice(JOIN_MODES)
        self.note(mode)
        with self.world.engine.connect() as connection:
            outer = connection.begin()
            if self.random.random() < 0.3:
                self.send_and_write(connection)
            with Session(connection, join_transaction_mode=mode) as session:
                for _ in range(self.random.randint(1, 2)):
                    self.work(session)
                    self.end_session(session)
            if self.random.random() < 0.6 and outer.is_active:
                self.note("outer commit")
                outer.commit()
            elif outer.is_active:
                self.note("outer rollback")
                outer.rollback()

    def core_block(self) -> None:
        with transaction(self.world.engine) as connection:
            self.work(connection, given=self.random.choice([None, connection]))
            self.maybe_abandon()

    def bare_connection(self) -> None:
        with self.world.engine.connect() as connection:
            for _ in range(self.random.randint(1, 2)):
                connection.begin()
                self.work(connection)
                ending = self.random.choice(["commit", "commit", "rollback", "close", "fail"])
                self.note(f"bare {ending}")
                if ending == "close":
                    return
                if ending == "fail":
                    self.break_promise(connection)
                    with suppress(sa.exc.IntegrityError):
                        connection.commit()
                    return  # the failed transaction is still open until the connection goes back
                getattr(connection, ending)()

    # -- what happens inside

    def work(self, scope: Any, *, given: Any = ..., depth: int = 0) -> None:
        given = scope if given is ... else given
        for _ in range(self.random.randint(0, 4)):
            actions: list[Callable[..., None]] = [self.send_and_write] * 4
            actions += [self.swallow_an_error, self.look]
            if depth < NESTED_MAX:
                actions += [self.nest, self.nest, self.nest_in_core]
            self.random.choice(actions)(scope, given=given, depth=depth)

    def send_and_write(self, scope: Any, *, given: Any = ..., depth: int = 0) -> None:
        given = scope if given is ... else given
        count = self.random.choice([1, 1, 1, 2, 3, 120 if self.random.random() < 0.1 else 1])
        labels = [f"o{len(self.labels) + i}" for i in range(count)]
        self.note(f"send {labels[0]} x{count}")
        ids = self.world.producer.send_many(
            [Message(SUBJECT, label) for label in labels], session=given
        )
        self.labels.update(zip(labels, ids, strict=True))
        if isinstance(scope, Session) and self.random.random() < 0.5:
            scope.add_all([Order(label=label) for label in labels])
            if self.random.random() < 0.5:
                scope.flush()
        else:
            scope.execute(sa.insert(Order), [{"label": label} for label in labels])

    def nest(self, scope: Any, *, given: Any, depth: int) -> None:
        """A savepoint of the session, or of the connection."""
        self.note("(")
        try:
            nested = scope.begin_nested()
        except sa.exc.InvalidRequestError:
            return
        try:
            self.work(scope, given=given, depth=depth + 1)
            ending = self.random.choice(["commit", "rollback", "rollback", "raise"])
            self.note(f"{ending} )")
            if ending == "raise":
                raise AbandonError
        except AbandonError:
            nested.rollback()
        except sa.exc.SQLAlchemyError:
            nested.rollback()
            raise
        else:
            getattr(nested, ending)()

    def nest_in_core(self, scope: Any, *, given: Any, depth: int) -> None:
        """A savepoint of the connection that the session knows nothing of."""
        connection = scope.connection() if isinstance(scope, Session) else scope
        self.note("[")
        if isinstance(scope, Session):
            scope.flush()
        nested = connection.begin_nested()
        for _ in range(self.random.randint(0, 2)):
            self.send_and_write(connection, given=given)
        ending = self.random.choice(["commit", "rollback"])
        self.note(f"{ending} ]")
        if isinstance(scope, Session):
            scope.flush()
        getattr(nested, ending)()

    def swallow_an_error(self, scope: Any, **_: Any) -> None:
        """A statement that fails, and an application that goes on as if nothing was."""
        self.note("error swallowed")
        with suppress(sa.exc.IntegrityError):
            scope.execute(sa.text("INSERT INTO business_order (id, label) VALUES (1, NULL)"))

    def look(self, scope: Any, **_: Any) -> None:
        scope.execute(sa.select(sa.func.count()).select_from(Order)).all()

    # -- how a transaction ends

    def end_session(self, session: Session) -> None:
        ending = self.random.choice(
            ["commit"] * 4 + ["rollback", "close", "fail", "behind", "behind_back", "raise"]
        )
        self.note(ending)
        if ending == "raise":
            raise AbandonError
        if ending == "fail":
            self.break_promise(session)
            with suppress(sa.exc.IntegrityError):
                session.commit()
            session.rollback()
            session.close()
        elif ending in ("behind", "behind_back"):
            session.flush()
            connection = session.connection()
            if connection.in_nested_transaction():
                return
            connection.commit() if ending == "behind" else connection.rollback()
            session.close()
        else:
            # Closing a joined session drops what was not flushed but keeps what was: a send counts
            # as flushed, so the business rows must be, too, for the two to be compared.
            session.flush()
            getattr(session, ending)()

    def maybe_abandon(self) -> None:
        if self.random.random() < 0.3:
            self.note("raise")
            raise AbandonError

    def break_promise(self, scope: Any) -> None:
        """Make the COMMIT itself fail."""
        label = f"broken{len(self.trace)}"
        scope.execute(sa.insert(Order).values(label=label, promise=NO_SUCH_ORDER))

    def current(self) -> Session:
        from qmq_client.current import current_session

        session: Session = current_session()
        return session
