"""What is said of a file of the tables that is missing, or not as it was written: its name, and what to do.

Files are written whole and synced, so a disk or other software has done it. Each page of a data file
has a checksum, which whoever reads it verifies. To go on without the file would lose rows, or count
some twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import unquote

import pyarrow as pa

from qmq_pipeline.errors import LakeError

#: How Spark says that it cannot read a file, and which one.
_OF_SPARK: Final = re.compile(
    r"\[(FAILED_READ_FILE\.\w+|PATH_NOT_FOUND)\]"
    r" (?:Encountered error while reading file|Path does not exist:) "
    r"(file://|file:)?(\S.*?)/((?:bronze|silver|gold|audit)/.*?\.parquet)"
)
#: Of the two ways in which Spark writes a name, the one in which some letters are escaped.
_AS_URL: Final = "file://"
_MISSING: Final = frozenset({"FAILED_READ_FILE.FILE_NOT_EXIST", "PATH_NOT_FOUND"})


@contextmanager
def told_by_name(root: str, path: str) -> Iterator[None]:
    """Raise `LakeError` if the data file at `path` is missing or damaged."""
    try:
        yield
    except FileNotFoundError as error:
        raise _missing(root, path) from error
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        if getattr(error, "errno", None):  # the system did not let it be read
            raise
        raise damaged(root, path, " ".join(str(error).split())) from error


def told_by_spark(text: str, log: str) -> LakeError | None:
    """The same, if that is what Spark says; `log` is the file with the details."""
    found = _OF_SPARK.search(text)
    if found is None:
        return None
    kind, scheme, root, path = found.groups()
    if scheme == _AS_URL:
        root, path = unquote(root), unquote(path)
    if kind in _MISSING:
        return _missing(root, path)
    return damaged(root, path, f"details are in {log}")


def damaged(root: str, path: str, said: str, remedy: str = "") -> LakeError:
    """The error for a file of the tables that is not as it was written; `remedy`: what helps, if that is special."""
    reason = f"it is not as it was written ({said})"
    return LakeError(path=_full(root, path), reason=reason, remedy=remedy or _remedy(root, path))


def _missing(root: str, path: str) -> LakeError:
    remedy = _remedy(root, path)
    return LakeError(
        path=_full(root, path),
        reason="it is missing, and a commit names it",
        remedy="Run this again, for another job may have replaced it meanwhile. If a file is still missing: "
        + remedy[0].lower()
        + remedy[1:],
    )


def _remedy(root: str, path: str) -> str:
    """What helps depends on whether the table can be made again."""
    layer, name, *_ = path.split("/")
    if layer == "bronze":
        return "Restore it from a copy of this folder, or ingest into another one"
    if layer == "audit" and path.endswith(".json"):
        return "Remove this file: only the result of that audit goes with it"
    if layer == "audit":
        return f"Remove the folder {_full(root, layer)}: only the results of past audits go with it"
    return f"Remove the folder {_full(root, layer)}/{name}: the next run makes the table anew"


def _full(root: str, path: str) -> str:
    return f"{root.rstrip('/')}/{path}"
