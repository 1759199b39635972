"""Which files of a table's folder may go: data that nobody names, and nothing else.

A folder may hold what others keep there, as a catalog does whose warehouse it is. So only what the writers of the
tables make is removed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from qmq_pipeline.tables.lake_files import DRAFT
from qmq_pipeline.tables.tallies import tally_path

#: Where Delta keeps its log, which has Parquet files of its own.
_DELTA_LOG: Final = "_delta_log/"
#: What Spark leaves beside the files that it writes.
_SPARK_MARK: Final = "_SUCCESS"


def swept(folder: str, paths: Iterable[str], kept: Collection[str]) -> list[str]:
    """The paths of what may go. Those of `kept`, which stay with their tallies, are relative to the folder."""
    staying = {f"{folder}/{path}" for name in kept for path in (name, tally_path(name))}
    return [path for path in paths if path not in staying and _is_data(path, folder)]


def _is_data(path: str, folder: str) -> bool:
    """Whether a file is data by its name, or what its writer leaves beside it or puts before it."""
    name = path.rpartition("/")[2]
    is_made = name.endswith((".parquet", ".crc")) or name == _SPARK_MARK or DRAFT in name
    return is_made and not path.startswith(f"{folder}/{_DELTA_LOG}")
