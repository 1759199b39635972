"""The error for a missing or damaged file of the tables, with its name and the remedy.

Each page of a data file has a checksum, which Spark verifies when it reads the page.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

from qmq_pipeline.errors import TablesError

#: The text of Spark's error for an unreadable file, with its name.
_OF_SPARK: Final = re.compile(
    r"\[(FAILED_READ_FILE\.\w+|PATH_NOT_FOUND)\]"
    r" (?:Encountered error while reading file|Path does not exist:) "
    r"(file://|file:)?(\S.*?)/((?:bronze|silver|gold|audit)/.*?\.parquet)"
)
#: Spark writes names in two ways; this is the one with escaped letters.
_AS_URL: Final = "file://"
_MISSING: Final = frozenset({"FAILED_READ_FILE.FILE_NOT_EXIST", "PATH_NOT_FOUND"})


def damage_in_error(text: str, log: str) -> TablesError | None:
    """The error for a file that Spark cannot read, if this text is about one; `log` is the file with the details."""
    found = _OF_SPARK.search(text)
    if found is None:
        return None
    kind, scheme, root, path = found.groups()
    if scheme == _AS_URL:
        root, path = unquote(root), unquote(path)
    layer, name, *_ = path.split("/")
    remedy = f"Remove the folder {root}/{layer}/{name}: the next run rebuilds the table"
    if layer == "bronze":
        remedy += ", as far as log and outbox still have its rows"
    reason = f"it was altered since it was written (details are in {log})"
    if kind in _MISSING:
        reason = "it is missing"
        remedy = f"Run this again, for another job may have replaced it meanwhile. If it is still missing: {remedy}"
    return TablesError(path=f"{root}/{path}", reason=reason, remedy=remedy)
