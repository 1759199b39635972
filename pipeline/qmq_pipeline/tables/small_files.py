"""Reads the small files of the tables' folder: commits, states, lists of kept files, the mark of the folder.

They are written whole and synced, so one that cannot be read was damaged: by a disk, or by other software. Then
the error names the file and what to do. To go on without it would lose rows, or count some twice.
"""

from __future__ import annotations

import json
from typing import Any, Final

from qmq_pipeline.errors import LakeError
from qmq_pipeline.tables.commits import Commit
from qmq_pipeline.tables.lake_files import LakeFiles

#: How reading something else than what was written fails.
_FAILURES: Final = (ValueError, KeyError, TypeError, AttributeError)


def read_commit(files: LakeFiles, path: str) -> Commit | None:
    """The commit at `path`; None if it does not exist. Raises `LakeError` if it is damaged."""
    try:
        text = files.read_text(path)
        return None if text is None else Commit.from_json(text)
    except _FAILURES as error:
        raise _damaged(files, path, error, _commit_remedy(files, path)) from error


def read_object(
    files: LakeFiles, path: str, *, remedy: str, field: str | None = None
) -> dict[str, Any] | None:
    """The JSON object at `path`, with that field if one is named; None if it does not exist.

    Raises `LakeError` with the `remedy` if it is damaged.
    """
    try:
        text = files.read_text(path)
        found = None if text is None else dict(json.loads(text))
        if found is not None and field is not None and field not in found:
            raise KeyError(field)
        return found
    except _FAILURES as error:
        raise _damaged(files, path, error, remedy) from error


def _commit_remedy(files: LakeFiles, path: str) -> str:
    """What helps depends on whether the table can be made again."""
    layer, name, *_ = path.split("/")
    if layer == "bronze":
        return "Restore it from a copy of this folder, or ingest into another one"
    if layer == "audit":
        return "Remove this file: only the result of that audit goes with it"
    return f"Remove the folder {files.root.rstrip('/')}/{layer}/{name}: the next run makes the table anew"


def _damaged(files: LakeFiles, path: str, error: Exception, remedy: str) -> LakeError:
    return LakeError(
        path=f"{files.root.rstrip('/')}/{path}",
        reason=f"it is not as it was written ({type(error).__name__}: {error})",
        remedy=remedy,
    )
