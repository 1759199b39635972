"""Quoted table names, for statements of a driver and for texts, and tables qualified with a schema.

In a statement, a percent sign is doubled for drivers with `%` parameters; in a text it is not.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from qmq_client.outbox.table import Tables


def table_sql(connection: sa.Connection | sa.Engine, table: Any) -> str:
    """The quoted name in a statement for `exec_driver_sql`."""
    return connection.dialect.identifier_preparer.format_table(table)


def table_text(connection: sa.Connection | sa.Engine, table: Any) -> str:
    """The quoted name for texts that people read, and for parameters of a statement."""
    return table_sql(connection, table).replace("%%", "%")


def in_own_schema(dialect: sa.Dialect, tables: Tables) -> Tables:
    """The tables, qualified with the default schema of the engine's connections.

    So a `search_path`, a USE or a temporary table of a transaction cannot lead to another table.
    Requires: the engine has connected.
    """
    if tables.outbox.schema is not None:
        return tables
    schema = "main" if dialect.name == "sqlite" else dialect.default_schema_name
    return tables if schema is None else _qualified(tables, schema)


@lru_cache(maxsize=64)
def _qualified(tables: Tables, schema: str) -> Tables:
    metadata = sa.MetaData()
    return Tables(
        outbox=tables.outbox.to_metadata(metadata, schema=schema),
        inbox=tables.inbox.to_metadata(metadata, schema=schema),
        order_lock=tables.order_lock.to_metadata(metadata, schema=schema),
    )
