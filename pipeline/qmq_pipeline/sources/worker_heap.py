"""What a worker of Spark has loaded is not searched for garbage after each of its tasks.

A worker that is used again collects garbage whenever a task is done, and walks through all that Spark, Arrow and
this package are made of: 50,000 objects and more, as long as it takes to decode a hundred thousand messages. What is
there when a reader begins stays until the process ends, so it is taken out of the search, once.
"""

from __future__ import annotations

import functools
import gc
import os
from typing import Final

#: Set by Spark for processes that do one task after the other.
REUSED: Final = "SPARK_REUSE_WORKER"


def keep_loaded() -> None:
    """Take what is loaded out of the search; nothing in a process that is not a worker, or has done so."""
    if os.environ.get(REUSED):
        _freeze()


@functools.cache
def _freeze() -> None:
    gc.freeze()
