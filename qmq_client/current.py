"""The session that code on this thread or task is running in, when it was opened for it.

Set by `@transactional` and by a consumer's inbox around the handler, read by the producer when a
send names no session. A context variable, so threads and tasks do not see each other's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

CURRENT_SESSION: Final[ContextVar[Session | None]] = ContextVar("qmq_current_session", default=None)


def current_session() -> Session | None:
    """The session opened for the running code, None outside."""
    return CURRENT_SESSION.get()


@contextmanager
def session_is_current(session: Session | None) -> Iterator[None]:
    """Make `session` the current one for the duration of a block; None hides an outer one."""
    token = CURRENT_SESSION.set(session)
    try:
        yield
    finally:
        CURRENT_SESSION.reset(token)
