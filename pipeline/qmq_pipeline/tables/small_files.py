"""Reads the small files of the tables' folder: commits, states, lists of kept files, the mark of the folder.

If one is damaged, the error names it and what to do (`damage.py`).
"""

from __future__ import annotations

import json
from typing import Any, Final

from qmq_pipeline.tables.commits import Commit
from qmq_pipeline.tables.damage import damaged
from qmq_pipeline.tables.lake_files import LakeFiles

#: How reading something else than what was written fails.
_FAILURES: Final = (ValueError, KeyError, TypeError, AttributeError)


def read_commit(files: LakeFiles, path: str) -> Commit | None:
    """The commit at `path`; None if it does not exist. Raises `LakeError` if it is damaged."""
    try:
        text = files.read_text(path)
        return None if text is None else Commit.from_json(text)
    except _FAILURES as error:
        raise damaged(files.root, path, _said(error)) from error


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
        raise damaged(files.root, path, _said(error), remedy) from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
