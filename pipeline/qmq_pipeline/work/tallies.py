"""One worker's part for a data file without a tally: read some columns, and write the tally."""

from __future__ import annotations

from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import table_named
from qmq_pipeline.tables.tallies import AUDITED, Tallying


def tally_piece(tables: str, table: str, path: str) -> int:
    """Write the tally of one committed data file; the number of its rows. May be repeated."""
    lake, of_table = Lake(tables), table_named(table)
    tallying = Tallying(of_table)
    rows = 0
    for batch in lake.read_file(of_table, path, AUDITED[table].columns):
        tallying.add(batch)
        rows += batch.num_rows
    lake.write_tally(of_table, path, tallying)
    return rows
