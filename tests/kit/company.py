"""What a command that runs inside the tests' process sets up there, put back behind the test.

A process of its own may keep its log levels and its path to the end. Here the next test, which may be
any on this worker, would miss log lines that it waits for, have lines written to an output that is
closed by now, or import from wherever the process happens to stand.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def put_back() -> Iterator[None]:
    """Behind it every logger but the root, which pytest looks after, and `sys.path` are as before."""
    loggers = {logger: (logger.level, logger.handlers[:]) for logger in _loggers()}
    path = sys.path[:]
    yield
    sys.path[:] = path
    for logger in _loggers():
        level, handlers = loggers.get(logger, (logging.NOTSET, []))
        if logger.level != level:
            logger.setLevel(level)
        logger.handlers[:] = handlers


def _loggers() -> list[logging.Logger]:
    known = logging.root.manager.loggerDict.values()
    return [logger for logger in known if isinstance(logger, logging.Logger)]
