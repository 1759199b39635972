"""Listeners of every engine or pool of the process, for the length of a test.

SQLAlchemy notes at the class that engines are listened to, and takes that back never. From then on it
goes another way with each statement, and the tests that follow in the same process would try that one
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa


@contextmanager
def listening(
    to_all: type[sa.Engine | sa.Pool], **listeners: Callable[..., object]
) -> Iterator[None]:
    """Inside, each event of this name at any of them calls its listener; behind, nothing is left."""
    for name, listener in listeners.items():
        sa.event.listen(to_all, name, listener)
    try:
        yield
    finally:
        for name, listener in listeners.items():
            sa.event.remove(to_all, name, listener)
        if issubclass(to_all, sa.Engine):
            sa.Engine._has_events = False


def left_behind() -> list[str]:
    """Events that somebody still listens to at all engines or pools, by name; put in order again."""
    names = [name for name in sa.Pool.dispatch._event_names if _at_all_pools(name)]
    for name in names:
        for listener in _at_all_pools(name):
            sa.event.remove(sa.Pool, name, listener)
    if sa.Engine._has_events:
        sa.Engine._has_events = False
        names.append("statements")
    return names


def _at_all_pools(name: str) -> list[Any]:
    return list(getattr(sa.Pool.dispatch, name)._clslevel.get(sa.Pool, ()))
