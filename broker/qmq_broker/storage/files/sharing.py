"""Whether a data directory has its files for itself.

`cp -al` and `rsync --link-dest` make copies whose files are the same ones under further names. What an opening
writes to the files of one such directory it writes to those of all; two brokers would write over each other. The
checkpoints are looked at: every opening writes them in place, so in such a copy they always have a second
name. Sealed segments may have one (`link_file`), and are never written.
"""

from __future__ import annotations

from qmq_broker.errors import SharedFilesError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import Disk


def refuse_shared(disk: Disk) -> None:
    """Raise `SharedFilesError` when this directory is a hard-linked copy, or has one. Changes nothing."""
    there = set(disk.names(layout.ROOT))
    for path in layout.CHECKPOINTS:
        if path not in there:
            continue
        file = disk.open(path)
        names = file.links()
        file.close()
        if names > 1:
            raise SharedFilesError(path=path, names=names)
