"""The objects that applications pass in: SQLAlchemy's engines, session makers, sessions and connections.

The asynchronous classes are imported for type checkers only, and recognized by their attributes:
loading their module would load asyncio.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

from qmq_client.errors import ConfigurationError, InvalidMessageError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import (
        AsyncConnection,
        AsyncEngine,
        AsyncSession,
        async_scoped_session,
        async_sessionmaker,
    )
    from sqlalchemy.orm import Session, scoped_session

_Kind = TypeVar("_Kind")

#: An engine, or a maker of sessions on one.
AnyEngine: TypeAlias = "sa.Engine | sessionmaker[Any] | AsyncEngine | async_sessionmaker[Any]"
#: An object whose transaction is awaited.
AnyAsyncSession: TypeAlias = "AsyncSession | async_scoped_session[Any] | AsyncConnection"
#: An object with a transaction.
AnySession: TypeAlias = "Session | scoped_session[Any] | sa.Connection | AnyAsyncSession"


def engine_of(given: Any) -> sa.Engine | None:
    """The synchronous engine behind an `AnyEngine`; None if it is not one."""
    settings = getattr(given, "kw", None)
    bind = settings.get("bind") if isinstance(settings, dict) else given
    engine = getattr(bind, "sync_engine", bind)
    return engine if isinstance(engine, sa.Engine) else None


def session_of(given: Any) -> Any:
    """The current session of a scoped session, or the object as given."""
    registry = getattr(given, "registry", None)
    return given if registry is None else registry()


def engine_and_factory(given: Any) -> tuple[sa.Engine, Any]:
    """`engine_of`, and a maker of such sessions; raises `ConfigurationError`."""
    engine = engine_of(given)
    if engine is None:
        raise ConfigurationError(
            setting="Producer(engine)",
            value=type(given).__name__,
            remedy="Give an engine, or a session maker that is bound to one.",
        )
    if hasattr(given, "kw"):
        return engine, given
    if isinstance(given, sa.Engine):
        return engine, sessionmaker(engine)
    from sqlalchemy.ext.asyncio import async_sessionmaker

    return engine, async_sessionmaker(given)


def checked(setting: str, given: Any, kind: type[_Kind], default: _Kind) -> _Kind:
    """The given object, or the default for None; raises `ConfigurationError` for another kind of object."""
    if given is None:
        return default
    if isinstance(given, kind):
        return given
    raise ConfigurationError(
        setting=setting, value=type(given).__name__, remedy=f"Give {kind.__name__}(…)."
    )


def listed(messages: Iterable[_Kind]) -> list[_Kind]:
    """The messages of one call; raises `InvalidMessageError` if it is not a list of messages."""
    try:
        each = iter(messages)
    except TypeError as error:
        raise InvalidMessageError(
            field="messages",
            limit="a list of messages",
            value=type(messages).__name__,
            remedy="Give a list; for a single message use the call without `_many`.",
        ) from error
    return list(each)
