"""The threads of one `Consumers`, by what they do: "pull", "work" and "settle"."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Threads:
    """Those of all its members. Not thread safe."""

    def __init__(self) -> None:
        self._threads: dict[str, list[threading.Thread]] = {"pull": [], "work": [], "settle": []}

    def add(self, kind: str, consumer: str, target: Callable[[], None]) -> None:
        """Make one that is not started."""
        # Daemons: a handler that never returns must not keep the interpreter from ending.
        name = f"qmq-{kind}-{consumer}"
        self._threads[kind].append(threading.Thread(target=target, name=name, daemon=True))

    def all(self) -> list[threading.Thread]:
        """Every one of them."""
        return [thread for threads in self._threads.values() for thread in threads]

    def alive(self, *kinds: str) -> list[threading.Thread]:
        """Those of these kinds that run."""
        return [one for kind in kinds for one in self._threads[kind] if one.is_alive()]
