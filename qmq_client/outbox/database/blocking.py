"""Blocking connections to the database of an application's asynchronous engine.

More than the URL says how to connect: `connect_args` hold certificates or a search path, and
listeners of `do_connect` insert a password that is fetched anew each time. SQLAlchemy keeps all of
it inside the engine's pool. So that pool is asked to connect, and for each blocking connection the
arguments are intercepted on their way to the asynchronous driver. Listeners added after the
producer are not called; an engine with an `async_creator` reveals nothing, so the URL is used.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import event

#: Arguments that only an asynchronous driver takes, by the blocking driver that replaces it.
_UNKNOWN: Final[Mapping[str, tuple[str, ...]]] = {
    "psycopg": ("cursor_factory",),
    "pymysql": ("cursor_cls", "echo", "password_creator", "sock"),
    "pysqlite": ("iter_chunk_size", "loop"),
}
#: Arguments with another name there.
_RENAMED: Final[Mapping[str, Mapping[str, str]]] = {"pymysql": {"db": "database"}}


def blocking_engine(engine: sa.Engine, url: sa.URL, **settings: Any) -> sa.Engine:
    """An engine with a blocking driver that connects as the asynchronous `engine` does.

    `url` is its URL with that driver; `settings` are those of `sqlalchemy.create_engine`.
    """
    made = sa.create_engine(url, **settings)
    event.listen(engine, "do_connect", _catch)

    @event.listens_for(made, "do_connect")
    def _as_the_application(
        dialect: sa.Dialect, record: Any, arguments: list[Any], options: dict[str, Any]
    ) -> None:
        caught = _caught_from(engine, record)
        if caught is not None:
            arguments[:], theirs = caught
            options.update(_translated(dialect.driver, theirs), **settings.get("connect_args", {}))

    return made


class _Catching(threading.local):
    """Whether this thread wants the arguments instead of a connection."""

    is_on = False


_catching = _Catching()


def _catch(_dialect: Any, _record: Any, arguments: list[Any], options: dict[str, Any]) -> Any:
    return (arguments, options) if _catching.is_on else None


def _caught_from(engine: sa.Engine, record: Any) -> tuple[list[Any], dict[str, Any]] | None:
    pool: Any = engine.pool
    _catching.is_on = True
    try:
        caught: tuple[list[Any], dict[str, Any]] = pool._invoke_creator(record)
    except sa.exc.MissingGreenlet:  # it does not ask its dialect: there is an `async_creator`
        return None
    finally:
        _catching.is_on = False
    return caught


def _translated(driver: str, options: Mapping[str, Any]) -> dict[str, Any]:
    names = _RENAMED.get(driver, {})
    unknown = _UNKNOWN.get(driver, ())
    return {names.get(name, name): value for name, value in options.items() if name not in unknown}
