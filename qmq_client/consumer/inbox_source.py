"""Makes the inbox of a consumer from its argument `inbox=`.

The kind of object is checked at decoration; its database is only checked when consumers are made,
because a session maker may be bound in between.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from qmq_client.errors import ConfigurationError
from qmq_client.wire.shown import shorten

if TYPE_CHECKING:
    import sqlalchemy as sa
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
    from sqlalchemy.orm import Session

    from qmq_client.consumer.options import ConsumerOptions
    from qmq_client.inbox import Inbox
    from qmq_client.inbox.async_inbox import AsyncInbox

    InboxSource = (
        Inbox
        | AsyncInbox
        | Callable[[], Session]
        | Callable[[], AsyncSession]
        | sa.Engine
        | AsyncEngine
    )

_REMEDY: Final = (
    "Give a sessionmaker or an async_sessionmaker bound to an engine, the engine, or an Inbox."
)


def check_source(source: object) -> None:
    """Raise `ConfigurationError` for an object that cannot be an inbox."""
    import sqlalchemy as sa

    from qmq_client.inbox import Inbox

    is_known = isinstance(source, Inbox | sa.Engine) or _is_engine_or_inbox_of_a_loop(source)
    if not callable(source) and not is_known:
        raise ConfigurationError(setting="inbox", value=shorten(source), remedy=_REMEDY)


def make_inbox(
    source: InboxSource | None, options: ConsumerOptions, *, is_async: bool, session_kind: str = ""
) -> Inbox | AsyncInbox | None:
    """The inbox of a handler, sync or async; raises `ConfigurationError` if it does not suit the handler.

    `session_kind`: the class that the handler has annotated its session with, if it has.
    """
    if source is None:
        return None
    inbox = _made(source, options)
    if inbox.group != options.group:
        raise ConfigurationError(
            setting="inbox",
            value=f"made for group {inbox.group}, the consumer is in {options.group}",
            remedy="Make the Inbox with the consumer's group.",
        )
    if inbox.is_async and not is_async:
        raise ConfigurationError(
            setting="inbox",
            value=f"asynchronous, the handler of {options.name} is not",
            remedy="Make the handler an `async def`, or give a sessionmaker.",
        )
    given = "AsyncSession" if inbox.is_async else "Session"
    if session_kind not in ("", given):
        raise ConfigurationError(
            setting="inbox",
            value=f"gives a {given}, the handler of {options.name} asks for a {session_kind}",
            remedy=f"Annotate the parameter {given}, or give the other kind of session maker.",
        )
    return inbox


def _made(source: Any, options: ConsumerOptions) -> Inbox | AsyncInbox:
    import sqlalchemy as sa

    from qmq_client.inbox import Inbox

    if isinstance(source, Inbox) or getattr(source, "is_async", None) is True:
        return source  # type: ignore[no-any-return]  # an AsyncInbox, not imported without need
    try:
        if _is_engine_or_inbox_of_a_loop(source) or _makes_async_sessions(source):
            from qmq_client.inbox.async_inbox import AsyncInbox

            return AsyncInbox(source, group=options.group)
        return Inbox(source, group=options.group)
    except (sa.exc.UnboundExecutionError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            setting="inbox",
            value=f"{shorten(source)} of {options.name} gives no session with an "
            f"engine ({type(error).__name__}: {shorten(str(error))})",
            remedy=_REMEDY,
        ) from error


def _is_engine_or_inbox_of_a_loop(source: object) -> bool:
    # Both exist only if SQLAlchemy's asyncio extension was imported, which needs an extra.
    engines = sys.modules.get("sqlalchemy.ext.asyncio")
    inboxes = sys.modules.get("qmq_client.inbox.async_inbox")
    return (engines is not None and isinstance(source, engines.AsyncEngine)) or (
        inboxes is not None and isinstance(source, inboxes.AsyncInbox)
    )


def _makes_async_sessions(source: object) -> bool:
    module = sys.modules.get("sqlalchemy.ext.asyncio")
    if module is None or not callable(source):
        return False
    # An unused session has nothing to close.
    return isinstance(source, module.async_sessionmaker) or isinstance(
        source(), module.AsyncSession | module.async_scoped_session
    )
