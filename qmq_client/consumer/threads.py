"""The threads of one `Consumers`, by what they do: "pull", "work" and "settle"."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Final

#: Whose thread this is; tasks and `asyncio.to_thread` take it along, threads of a handler's own do not.
_CURRENT: Final[ContextVar[object]] = ContextVar("qmq_consumer_threads", default=None)


class Threads:
    """Those of all its members. Not thread safe."""

    def __init__(self) -> None:
        self._threads: dict[str, list[threading.Thread]] = {"pull": [], "work": [], "settle": []}

    def add(self, kind: str, consumer: str, target: Callable[[], None]) -> None:
        """Make one that is not started."""
        # Daemons: a handler that never returns must not keep the interpreter from ending.
        name = f"qmq-{kind}-{consumer}"
        run = partial(self._run, target)
        self._threads[kind].append(threading.Thread(target=run, name=name, daemon=True))

    def are_current(self) -> bool:
        """Whether this code, as a handler's, has to return before one of them can end."""
        return _CURRENT.get() is self

    def _run(self, target: Callable[[], None]) -> None:
        _CURRENT.set(self)
        target()

    def all(self) -> list[threading.Thread]:
        """Every one of them."""
        return [thread for threads in self._threads.values() for thread in threads]

    def alive(self, *kinds: str) -> list[threading.Thread]:
        """Those of these kinds that run."""
        return [one for kind in kinds for one in self._threads[kind] if one.is_alive()]
