"""The check that no other directory shares the files of a data directory.

`cp -al` and `rsync --link-dest` make copies whose files are the originals under further names. A
write into one such directory appears in all of them, and two brokers would overwrite each other.
The check reads the link counts of the checkpoints: every start writes them in place, so in such a
copy they always have a second name. Sealed segments may legitimately have one (`link_file`); they
are never written.
"""

from __future__ import annotations

from qmq_broker.errors import SharedFilesError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk


def refuse_shared(disk: Disk) -> None:
    """Raise `SharedFilesError` if this directory is a hard-linked copy, or has one.

    Changes nothing.
    """
    there = set(disk.names(layout.ROOT))
    for path in layout.CHECKPOINTS:
        if path not in there:
            continue
        file = disk.open(path)
        names = file.links()
        file.close()
        if names > 1:
            raise SharedFilesError(path=path, names=names)
