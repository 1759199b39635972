"""Disk blocks for a log: new ones, or such as the disk has given and something has been written to.

Writing over blocks is several times faster than taking new ones on many disks, so a figure says which
it was taken on, and what is compared has the same. A broker recycles segments that it gave up; here
they are made beforehand.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from qmq_broker.options import StoreOptions
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.layout import COMMIT_LOG, spare_path
from qmq_broker.storage.store import Store
from qmq_client.clock import SYSTEM_CLOCK

MIB: Final = 1024 * 1024
_PIECE: Final = os.urandom(MIB)


def segment_bytes_for(count: int) -> int:
    """The length of a segment that holds so many bytes of frames and a frame more."""
    return (count // MIB + 16) * MIB


def make_recycled(directory: Path, *, segment_bytes: int, segments: int = 1) -> None:
    """A data directory whose first segments will be written over blocks that were written."""
    options = StoreOptions(segment_bytes=segment_bytes)
    Store.open(OsDisk(str(directory)), SYSTEM_CLOCK, options).close()
    for number in range(segments):
        write_blocks(directory / spare_path(COMMIT_LOG, number), segment_bytes)


def write_blocks(path: Path, count: int) -> None:
    """A file of so many bytes, durable on return. Requires: a multiple of `MIB`."""
    with path.open("xb") as file:
        for _ in range(count // MIB):
            file.write(_PIECE)
        file.flush()
        os.fsync(file.fileno())
