"""The file that marks a folder as one of tables, and tells the version of its layout.

A folder without it is never written to unless it is new or empty, and never read: so a slip in its name is noticed.
"""

from __future__ import annotations

import json
from typing import Final

from qmq_pipeline.errors import LakeError
from qmq_pipeline.tables.lake_files import LakeFiles
from qmq_pipeline.tables.small_files import read_object

LAKE_VERSION: Final = 2
#: Name of the file.
MARKER: Final = "LAKE"
_VERSION: Final = "version"
_CONTENT: Final = json.dumps({_VERSION: LAKE_VERSION})


def is_lake(path: str) -> bool:
    """Whether there are tables at this path or URL; raises `LakeError` for a scheme that nobody knows."""
    try:
        return LakeFiles(path).read_text(MARKER) is not None
    except NotADirectoryError:
        return False


def is_marked(files: LakeFiles) -> bool:
    """Whether the folder has the mark; raises `LakeError` for another version."""
    remedy = f"If qmq made this folder, write {_CONTENT} into the file"
    known = read_object(files, MARKER, field=_VERSION, remedy=remedy)
    if known is None:
        return False
    if known[_VERSION] != LAKE_VERSION:
        raise LakeError(
            path=files.root,
            reason=f"its layout is of version {known[_VERSION]}; known: {LAKE_VERSION}",
            remedy="Use the version of qmq that made it, or another folder",
        )
    return True


def mark(files: LakeFiles) -> None:
    """Create and mark the folder; raises `LakeError` if it holds other things. Survives a power cut."""
    if files.strangers():
        raise LakeError(
            path=files.root,
            reason="it holds other things than tables of qmq",
            remedy="Give a folder that is new or empty, or one that `qmq pipeline` has made",
        )
    files.create()
    files.write_text(MARKER, _CONTENT)
    files.sync_names([MARKER])
