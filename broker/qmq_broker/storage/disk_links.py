"""One file under two names: how a backup takes a sealed segment without copying it.

What is written under one name stands under the other, so only files are linked that are never written
again. `Segments.adopt` sees to it that a linked segment is not recycled.
"""

from __future__ import annotations

import errno
import os
from typing import Final

from qmq_broker.storage.disk import OsDisk
from qmq_broker.storage.disk_errors import translate

#: Another file system, one without links, or one whose links are used up.
_NOT_LINKED: Final = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}
)


def link_file(source: OsDisk, path: str, target: OsDisk) -> bool:
    """Give a file the same path below `target` too; false where the file system cannot do that.

    Durable after the next sync of the directory. Raises `DiskError`.
    """
    try:
        os.link(f"{source.root}/{path}", f"{target.root}/{path}", follow_symlinks=False)
    except OSError as error:
        if error.errno in _NOT_LINKED:
            return False
        raise translate(error, "link", path) from error
    return True
