"""Repeatable steps of a revision: each first checks whether it was already done.

MySQL commits every DDL statement by itself, so a killed run leaves some steps done and no revision
recorded. A rerun skips these steps. When Alembic only prints the SQL, nothing is checked: the
statements assume a database at the previous revision.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import context, op


def names() -> tuple[str | None, str]:
    """Schema and table prefix from the configuration."""
    options = context.config
    return (
        options.get_main_option("qmq_schema") or None,
        options.get_main_option("qmq_prefix", "qmq_"),
    )


def create_tables(tables: Sequence[sa.Table]) -> None:
    """Create each missing table with its indexes."""
    for table in tables:
        if not _is_there(table):
            op.execute(sa.schema.CreateTable(table))
        for index in sorted(table.indexes, key=lambda index: str(index.name)):
            create_index(index)


def drop_tables(tables: Sequence[sa.Table]) -> None:
    """Drop the tables that exist."""
    for table in tables:
        if context.is_offline_mode() or _is_there(table):
            op.execute(sa.schema.DropTable(table))


def create_index(index: sa.Index) -> None:
    """Create the index unless one of this name exists."""
    if not _has_index(index):
        op.execute(sa.schema.CreateIndex(index))


def drop_index(index: sa.Index) -> None:
    """Drop the index if it exists."""
    if context.is_offline_mode() or _has_index(index):
        op.execute(sa.schema.DropIndex(index))


def _is_there(table: sa.Table) -> bool:
    if context.is_offline_mode():
        return False
    return sa.inspect(op.get_bind()).has_table(table.name, schema=table.schema)


def _has_index(index: sa.Index) -> bool:
    if context.is_offline_mode() or index.table is None:
        return False
    found = sa.inspect(op.get_bind()).get_indexes(index.table.name, schema=index.table.schema)
    return any(each["name"] == index.name for each in found)
