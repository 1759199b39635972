"""What a random program does inside its transactions; see `programs.py`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.errors import AutocommitError
from qmq_client.message import Message
from tests.client.outbox.faces import is_session, run_sync, settled
from tests.client.outbox.interference import Deadlock, Fate, kill, locked_row
from tests.client.world import SUBJECT, Order, World

NESTED_MAX: Final = 3
NO_SUCH_ORDER: Final = 10**9
#: aiosqlite never ends a second close of one connection, which a cancelled `invalidate` leads to.
CANCEL_S_MAX: Final = 2


class AbandonError(Exception):
    """The application's own error, which leaves a block."""


class Actions:
    """The state of one program, and the steps it is made of."""

    def __init__(self, world: World, fate: Fate, seed: int) -> None:
        self.world = world
        self.fate = fate
        self.seed = seed
        self.random = random.Random(seed)
        self.trace: list[str] = []
        self._labels_made = 0
        #: Labels whose message was refused although the business row is there.
        self.excused: set[str] = set()
        self.is_ended_by_text = False
        self.awaits = 0
        self.cancel_at = 0
        self.cancel_turns = 0
        self._cancelling: asyncio.Task[None] | None = None

    def note(self, text: str) -> None:
        self.trace.append(text)

    # -- waiting, and being cancelled meanwhile

    async def do(self, value: Any) -> Any:
        """Await what an asynchronous engine gives; perhaps be cancelled while waiting."""
        self.awaits += 1
        if self.awaits == self.cancel_at:
            self.note("cancel")
            task = asyncio.current_task()
            assert task is not None
            self._cancelling = asyncio.ensure_future(_cancel_later(task, self.cancel_turns))
        return await settled(value)

    async def let_cancellation_pass(self) -> None:
        """A cancellation under way strikes here, and what it left to be closed is closed."""
        self.cancel_at = 0
        cancelling, self._cancelling = self._cancelling, None
        if cancelling is None:
            return
        task = asyncio.current_task()
        assert task is not None
        with suppress(asyncio.CancelledError):
            while not cancelling.done():
                await asyncio.sleep(0)
            await asyncio.sleep(0)
        task.uncancel()
        others = asyncio.all_tasks() - {task}
        if others:
            _, pending = await asyncio.wait(others, timeout=CANCEL_S_MAX)
            for stuck in pending:
                stuck.cancel()

    # -- what happens inside

    async def work(
        self,
        scope: Any,
        *,
        given: Any = ...,
        depth: int = 0,
        is_joined: bool = False,
        is_plain: bool = False,
    ) -> None:
        given = scope if given is ... else given
        for _ in range(self.random.randint(0, 4)):
            actions: list[Callable[..., Any]] = [self.send_and_write] * 5
            actions += [self.look] if is_plain else [self.swallow_an_error, self.look]
            if depth < NESTED_MAX and not is_plain:
                actions += [self.nest, self.nest, self.nest_in_core, self.nest_in_text]
            if self.random.random() < 0.1 and not (is_plain or is_joined):
                actions = self._abuses()
            await self.random.choice(actions)(scope, given=given, depth=depth)

    def _abuses(self) -> list[Callable[..., Any]]:
        abuses: list[Callable[..., Any]] = [self.define_a_table]
        if self.world.kind != "sqlite":
            abuses += [self.be_killed, self.run_into_a_deadlock, self.miss_a_lock]
        return abuses

    def new_labels(self, count: int) -> list[str]:
        """Labels that no other row of the program has, whatever becomes of these."""
        first, self._labels_made = self._labels_made, self._labels_made + count
        return [f"{self.seed}.{number}" for number in range(first, self._labels_made)]

    async def send(self, labels: Sequence[str], given: Any) -> None:
        """Now, by one INSERT."""
        sent = self.world.producer.send_many(messages_of(labels), session=given)
        if self.world.is_async:
            await self.do(sent)

    def forget_to_await(self, labels: Sequence[str], given: Any) -> None:
        """With the next flush of the asynchronous session."""
        self.world.producer.send_many(messages_of(labels), session=given)

    async def send_and_write(self, scope: Any, *, given: Any = ..., **_: Any) -> None:
        given = scope if given is ... else given
        count = self.random.choice([1, 1, 1, 2, 3, 120 if self.random.random() < 0.1 else 1])
        labels = self.new_labels(count)
        self.note(f"send {labels[0]} x{count}")
        if self.world.is_async and is_session(scope) and self.random.random() < 0.1:
            self.note("not awaited")
            self.forget_to_await(labels, given)
            await self._write_by_the_unit_of_work(scope, labels)
        elif self.random.random() < 0.5:
            await self.send(labels, given)
            await self._write(scope, labels)
        else:
            try:
                await self._write(scope, labels)
                await self.send(labels, given)
            except AutocommitError:
                # Of this send, or of a hook's in the flush. A cancelled task may leave the pool such a
                # connection: its rows are committed one by one, and the application gets this error.
                self.excused.update(labels)
                raise
            except asyncio.CancelledError:
                # As if refused: after an end given as text asyncpg has committed what was written before it.
                if self.is_ended_by_text and self.world.engine.dialect.driver == "asyncpg":
                    self.excused.update(labels)
                raise

    async def _write(self, scope: Any, labels: list[str]) -> None:
        if is_session(scope) and self.random.random() < 0.5:
            await self._write_by_the_unit_of_work(scope, labels)
        else:
            await self.do(scope.execute(sa.insert(Order), [{"label": label} for label in labels]))

    async def _write_by_the_unit_of_work(self, scope: Any, labels: list[str]) -> None:
        scope.add_all([Order(label=label) for label in labels])
        # What is not flushed is not tied to the savepoint that is open now.
        await self.do(scope.flush())

    async def nest(self, scope: Any, *, given: Any, depth: int) -> None:
        """A savepoint of the session, or of the connection."""
        self.note("(")
        nested = await self.do(scope.begin_nested())
        try:
            await self.work(scope, given=given, depth=depth + 1)
            ending = self.random.choice(["commit", "rollback", "rollback", "raise"])
            self.note(f"{ending} )")
            if ending == "raise":
                raise AbandonError
        except AbandonError:
            await self.do(nested.rollback())
        except BaseException:  # what `with` would do, too
            self.note("error )")
            await self.do(nested.rollback())
            raise
        else:
            await self.do(getattr(nested, ending)())

    async def nest_in_core(self, scope: Any, *, given: Any, **_: Any) -> None:
        """A savepoint of the connection that the session knows nothing of."""
        connection = await self.do(scope.connection()) if is_session(scope) else scope
        self.note("[")
        if is_session(scope):
            await self.do(scope.flush())
        nested = await self.do(connection.begin_nested())
        for _i in range(self.random.randint(0, 2)):
            await self.send_and_write(connection, given=given)
        ending = self.random.choice(["commit", "rollback"])
        self.note(f"{ending} ]")
        if is_session(scope):
            await self.do(scope.flush())
        await self.do(getattr(nested, ending)())

    async def nest_in_text(self, scope: Any, *, given: Any, depth: int) -> None:
        """A savepoint of which SQLAlchemy knows nothing at all."""
        name = f"text_{depth}"
        self.note("<")
        await self.do(scope.execute(sa.text(f"SAVEPOINT {name}")))
        for _i in range(self.random.randint(0, 2)):
            await self.send_and_write(scope, given=given)
        ending = self.random.choice(["RELEASE SAVEPOINT", "ROLLBACK TO SAVEPOINT"])
        self.note(f"{ending} >")
        await self.do(scope.execute(sa.text(f"{ending} {name}")))

    async def swallow_an_error(self, scope: Any, **_: Any) -> None:
        """A statement that fails, and an application that goes on as if nothing was."""
        self.note("error swallowed")
        with suppress(sa.exc.IntegrityError):
            await self.do(
                scope.execute(sa.text("INSERT INTO business_order (id, label) VALUES (1, NULL)"))
            )

    async def look(self, scope: Any, **_: Any) -> None:
        await self.do(scope.execute(sa.select(sa.func.count()).select_from(Order)))

    # -- what is done to it

    async def define_a_table(self, scope: Any, **_: Any) -> None:
        """On MySQL this commits what came before it."""
        self.note("DDL")
        name = f"scratch_{self.seed}_{len(self.trace)}"
        await self.do(scope.execute(sa.text(f"CREATE TABLE {name} (id INTEGER)")))

    async def be_killed(self, scope: Any, **_: Any) -> None:
        """The server ends the session; the program hears of it at its next statement."""
        self.note("killed")
        await self.on_connection(scope, lambda connection: kill(self.world, connection))

    async def run_into_a_deadlock(self, scope: Any, **_: Any) -> None:
        """As its victim, and goes on as if nothing was."""
        self.note("deadlock swallowed")
        with Deadlock(self.world) as other:
            if self.world.kind == "postgresql":  # who looks first is the victim
                await self.do(scope.execute(sa.text("SET LOCAL deadlock_timeout = '10ms'")))
            await self.do(scope.execute(sa.text(other.first)))
            other.close_the_circle()
            with suppress(sa.exc.OperationalError):
                await self.do(scope.execute(sa.text(other.second)))

    async def miss_a_lock(self, scope: Any, **_: Any) -> None:
        """And goes on without it."""
        self.note("lock timeout swallowed")
        with locked_row(self.world) as statement, suppress(sa.exc.OperationalError):
            await self.do(scope.execute(sa.text(statement)))

    def maybe_arm(self, ending: str = "commit") -> None:
        """Sometimes the COMMIT that comes now is struck."""
        if ending == "commit" and self.random.random() < 0.1:
            what = self.random.choice(["kill", "lose"])
            self.note(f"{what} at the COMMIT")
            self.fate.arm(what)

    def maybe_abandon(self) -> None:
        if self.random.random() < 0.3:
            self.note("raise")
            raise AbandonError

    async def fail_the_commit(self, scope: Any) -> None:
        """Make the COMMIT itself fail: a promise that is not kept, or the end of the session."""
        if self.world.kind == "mysql":
            self.fate.arm("kill")
        else:
            label = f"broken {self.seed}.{len(self.trace)}"
            await self.do(
                scope.execute(sa.insert(Order).values(label=label, promise=NO_SUCH_ORDER))
            )
        with suppress(sa.exc.IntegrityError, sa.exc.OperationalError):
            await self.do(scope.commit())

    # -- past SQLAlchemy

    async def on_connection(self, scope: Any, function: Callable[[sa.Connection], Any]) -> None:
        """Call something with the blocking connection behind a session or connection."""

        def call(sync: Any) -> None:
            function(sync.connection() if not isinstance(sync, sa.Connection) else sync)

        await self.do(run_sync(scope, call))

    async def on_driver(self, scope: Any, method: str) -> None:
        """`commit` or `rollback` of the driver's own connection."""

        def call(connection: sa.Connection) -> None:
            driver: Any = connection.connection
            getattr(driver, method)()

        await self.on_connection(scope, call)


def messages_of(labels: Sequence[str]) -> list[Message]:
    """One for each label, with the label as its body."""
    return [Message(SUBJECT, label) for label in labels]


async def _cancel_later(task: asyncio.Task[Any], turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
