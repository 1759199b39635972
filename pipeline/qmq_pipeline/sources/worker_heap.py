"""Tunes garbage collection and memory of Spark's workers: loaded objects are not scanned, freed memory is kept.

A reused worker collects garbage after every task and scans all objects of Spark, Arrow and this
package: 50,000 and more, in the time it takes to decode a hundred thousand messages. Objects that
exist when a reader begins live until the process ends, so they are excluded from collection, once.

A scan frees the blocks that it read, and takes new ones of the same size. By default glibc returns
them to the system in between, which then clears each page before reuse: 26 for each thousand
messages of a KiB.
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
    """Do both, once; does nothing in processes that are not workers."""
    if os.environ.get(REUSED):
        _prepare()


@functools.cache
def _prepare() -> None:
    gc.freeze()
    bytes(_KEPT_BYTES)  # zeros that are never read take no memory
