"""Spares Spark's workers from searching loaded modules for garbage after each task.

A worker that is reused collects garbage after every task and so walks through everything that
Spark, Arrow and this package have loaded: 50,000 objects and more, in the time it takes to decode a
hundred thousand messages. What is loaded when a reader begins stays until the process ends, so it
is taken out of the search, once.
"""

from __future__ import annotations

import functools
import gc
import os
from typing import Final

#: Set by Spark for processes that run one task after the other.
REUSED: Final = "SPARK_REUSE_WORKER"


def keep_loaded() -> None:
    """Exclude what is loaded from garbage collection, once; does nothing in other processes than workers."""
    if os.environ.get(REUSED):
        _freeze()


@functools.cache
def _freeze() -> None:
    gc.freeze()
