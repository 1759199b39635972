"""Prepares the heap of a worker of Spark: what is loaded is not searched, what is freed is kept.

A worker that is reused collects garbage after every task and so walks through everything that
Spark, Arrow and this package have loaded: 50,000 objects and more, in the time it takes to decode a
hundred thousand messages. What is loaded when a reader begins stays until the process ends, so it
is taken out of the search, once.

A scan frees the blocks that it read, and takes new ones of the same size. By itself glibc hands them back to the
system in between, which then clears each page that it gives out again: 26 for each thousand messages
of a KiB.
"""

from __future__ import annotations

import functools
import gc
import os
from typing import Final

#: Set by Spark for processes that run one task after the other.
REUSED: Final = "SPARK_REUSE_WORKER"
#: glibc keeps free memory of twice the largest block that was freed, if that is below 32 MiB.
_KEPT_BYTES: Final = 16 * 1024 * 1024


def prepare_heap() -> None:
    """Do both, once; nothing in other processes than workers."""
    if os.environ.get(REUSED):
        _prepare()


@functools.cache
def _prepare() -> None:
    gc.freeze()
    bytes(_KEPT_BYTES)  # unread zeros take no memory
