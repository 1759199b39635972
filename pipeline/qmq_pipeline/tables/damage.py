"""The error about a file of the tables that is missing or damaged: its name, and the remedy.

Each page of a data file has a checksum, which Spark verifies for what it reads.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

from qmq_pipeline.errors import TablesError

#: How Spark says that it cannot read a file, and which one.
_OF_SPARK: Final = re.compile(
    r"\[(FAILED_READ_FILE\.\w+|PATH_NOT_FOUND)\]"
    r" (?:Encountered error while reading file|Path does not exist:) "
    r"(file://|file:)?(\S.*?)/((?:bronze|silver|gold|audit)/.*?\.parquet)"
)
#: Of the two ways in which Spark writes a name, the one in which some letters are escaped.
_AS_URL: Final = "file://"
_MISSING: Final = frozenset({"FAILED_READ_FILE.FILE_NOT_EXIST", "PATH_NOT_FOUND"})


def damage_in_error(text: str, log: str) -> TablesError | None:
    """The error for a file that Spark cannot read, if that is what it says; `log` is the file with the details."""
    found = _OF_SPARK.search(text)
    if found is None:
        return None
    kind, scheme, root, path = found.groups()
    if scheme == _AS_URL:
        root, path = unquote(root), unquote(path)
    layer, name, *_ = path.split("/")
    remedy = f"Remove the folder {root}/{layer}/{name}: the next run makes the table again"
    if layer == "bronze":
        remedy += ", as far as log and outbox still have its rows"
    reason = f"it is not as it was written (details are in {log})"
    if kind in _MISSING:
        reason = "it is missing"
        remedy = f"Run this again, for another job may have replaced it meanwhile. If it is still missing: {remedy}"
    return TablesError(path=f"{root}/{path}", reason=reason, remedy=remedy)
