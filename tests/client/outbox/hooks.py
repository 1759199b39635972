"""Events of SQLAlchemy whose listeners write a business row and send, once each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy import event

from tests.client.world import Order

if TYPE_CHECKING:
    from tests.client.outbox.actions import Actions

#: Writes the row and sends, on a synchronous session or connection.
Write = Callable[[Any], object]

#: Listeners that are given the session.
OF_SESSION: Final = ("before_commit", "before_flush", "after_flush", "after_flush_postexec")
#: Listeners that are given the connection.
OF_CONNECTION: Final = ("after_begin", "after_insert", "commit")
HOOKS: Final = OF_SESSION + OF_CONNECTION


@contextmanager
def hook(name: str, session: Any, engine: sa.Engine, write: Write) -> Iterator[None]:
    """Inside, the first event of this name writes. `session` is a synchronous one."""
    target = {"after_insert": Order, "commit": engine}.get(name, session)
    is_done = False

    def listen(*given: Any) -> None:
        nonlocal is_done
        if is_done:  # its own INSERT is an event, too
            return
        is_done = True
        write(_scope(name, given))

    event.listen(target, name, listen)
    try:
        yield
    finally:
        event.remove(target, name, listen)


def _scope(name: str, given: tuple[Any, ...]) -> Any:
    """Of what an event tells its listeners, that which they may write through."""
    return given[{"after_begin": 2, "after_insert": 1}.get(name, 0)]


@contextmanager
def hooked(program: Actions, session: Any) -> Iterator[None]:
    """Inside, a listener of the program's choice sends with labels of the program."""
    name = program.random.choice(HOOKS)
    program.note(f"hook {name}")

    def write(scope: Any) -> None:
        (label,) = program.new_labels(1)
        program.world.send(label, scope)
        connection = scope if isinstance(scope, sa.Connection) else scope.connection()
        connection.execute(sa.insert(Order).values(label=label))

    inner = session.sync_session if program.world.is_async else session
    with hook(name, inner, program.world.sync_engine, write):
        yield
