"""One worker's part of a merge: for each folder one file in place of many, with the same rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import pyarrow as pa

from qmq_pipeline.errors import LakeError
from qmq_pipeline.tables.commits import DataFile
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.lake_files import ROW_GROUP_ROWS
from qmq_pipeline.tables.schemas import table_named
from qmq_pipeline.tables.table import Table
from qmq_pipeline.tables.tallies import AUDITED
from qmq_pipeline.work.ranges import BY_SUBJECT


def merge_piece(
    tables: str, table: str, name: str, files: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Rewrite files, given in order, as one file with this name in each folder.

    Returns the files that replace them; a file that is alone in its folder stays. May be repeated.
    """
    lake, made_of = Lake(tables), table_named(table)
    merged = []
    of_folders = groupby(
        (DataFile(**one) for one in files), key=lambda one: one.path.rpartition("/")[0]
    )
    for folder, of_folder in of_folders:
        some = list(of_folder)
        if len(some) == 1:
            merged += some
            continue
        write = lake.write_tallied if table in AUDITED else lake.write
        file = write(made_of, f"{folder}/{name}", _rows(lake, made_of, some))
        if file.rows != sum(one.rows for one in some):
            raise LakeError(
                path=lake.url(f"{lake.folder(made_of)}/{some[0].path}"),
                reason="it, or one of those behind it, has other rows than its commit says",
                remedy="Ingest the log into another folder",
            )
        merged.append(file)
    return [asdict(one) for one in merged]


def _rows(lake: Lake, table: Table, files: Sequence[DataFile]) -> Iterator[pa.RecordBatch]:
    """All rows: in order of the log, or by subject if the files are sorted by subject."""
    batches = [batch for one in files for batch in lake.read_file(table, one.path, table.names)]
    rows = pa.Table.from_batches(batches, table.arrow())
    if table in BY_SUBJECT:
        rows = rows.take(pa.compute.sort_indices(rows["subject"]))
    yield from rows.combine_chunks().to_batches(max_chunksize=ROW_GROUP_ROWS)
