"""Every table by its name; the columns of each are in the module of its layer.

All code takes tables from here, so that a table that travels to a worker is the same object there.
A table's version goes up when a column is added; what files of an older version lack is read as null.
`MESSAGES` and `SCHEDULED` are what the source gives under these names; stored, they are rows of `LOG`. All times are UTC with microseconds. `docs/pipeline-tables.md`
prints these tables, and a test holds both equal. No Spark: workers and plain programs use this module too.
"""

from __future__ import annotations

import copyreg
from typing import Final

from qmq_pipeline.tables.audits import AUDIT_FINDINGS, AUDIT_RUN, PROGRESS
from qmq_pipeline.tables.bronze import ACTIONS, LOG, MESSAGES, OUTBOX, SCHEDULED, SPANS
from qmq_pipeline.tables.gold import (
    DEAD_LETTERS,
    DELAY_LATENESS,
    FLOW_MINUTE,
    GROUP_LAG,
    LATENCY_MINUTE,
    PRODUCERS,
)
from qmq_pipeline.tables.silver import (
    DELIVERIES,
    GROUP_SPANS,
    LIFECYCLE,
    PART_DAYS,
    PRODUCER_PARTS,
)
from qmq_pipeline.tables.table import Table

__all__ = [
    "ACTIONS",
    "AUDIT_FINDINGS",
    "AUDIT_RUN",
    "DEAD_LETTERS",
    "DELAY_LATENESS",
    "DELIVERIES",
    "FLOW_MINUTE",
    "GROUP_LAG",
    "GROUP_SPANS",
    "LATENCY_MINUTE",
    "LIFECYCLE",
    "LOG",
    "MESSAGES",
    "OUTBOX",
    "PART_DAYS",
    "PRODUCERS",
    "PRODUCER_PARTS",
    "PROGRESS",
    "SCHEDULED",
    "SPANS",
    "TABLES",
    "table_named",
]

TABLES: Final = {
    table.name: table
    for table in (
        MESSAGES,
        SCHEDULED,
        LOG,
        SPANS,
        ACTIONS,
        OUTBOX,
        DELIVERIES,
        LIFECYCLE,
        GROUP_SPANS,
        PRODUCER_PARTS,
        PART_DAYS,
        FLOW_MINUTE,
        LATENCY_MINUTE,
        GROUP_LAG,
        DEAD_LETTERS,
        DELAY_LATENESS,
        PRODUCERS,
        AUDIT_RUN,
        AUDIT_FINDINGS,
        PROGRESS,
    )
}


def table_named(name: str) -> Table:
    """The table of this name. Raises `KeyError`."""
    return TABLES[name]


# Tables travel to workers by name, so that the same table is the same object there.
copyreg.pickle(Table, lambda table: (table_named, (table.name,)))
