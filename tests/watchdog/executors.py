"""Threads beside a sweep as slow and as quick as they can be."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import cache
from typing import Any


class _Late(Future[Any]):
    """Done when somebody asks for it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work = cache(work)

    def result(self, timeout: float | None = None) -> Any:
        return self._work()

    def exception(self, timeout: float | None = None) -> None:
        self._work()


class LateExecutor(Executor):
    """The slowest threads."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        return _Late(lambda: work(*args, **options))


class EagerExecutor(Executor):
    """The quickest ones."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args, **options))
        return done
