"""Whether the tables of a database are those that this version works with.

Only presence and revision, because every start and every first sweep pays for it; `qmq db check`
also compares types, sizes, indexes and collations.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import sqlalchemy as sa

from qmq_client.outbox.checking.rights import is_hidden
from qmq_client.outbox.table import REVISIONS, Tables

_VERSION_SUFFIX = "version"


@dataclass(frozen=True, slots=True)
class SchemaLook:
    """The result of looking at our tables."""

    #: Each missing table and column, and an unknown revision; one text each.
    faults: list[str]
    #: Tables that the server may hide from this user.
    hidden: list[sa.Table]


def look_at_schema(
    connection: sa.Connection, tables: Tables, needed: Sequence[sa.Table]
) -> SchemaLook:
    """Look at the needed tables. A revision that this user may not read is ignored."""
    faults: list[str] = []
    hidden: list[sa.Table] = []
    inspector = sa.inspect(connection)
    schema = tables.outbox.schema
    names = set(inspector.get_table_names(schema))
    for table in needed:
        if table.name not in names:
            if is_hidden(connection, table):
                hidden.append(table)
            else:
                faults.append(f"table {table.fullname} is missing")
            continue
        there = {column["name"] for column in inspector.get_columns(table.name, schema)}
        faults += [
            f"column {table.fullname}.{column.name} is missing"
            for column in table.columns
            if column.name not in there
        ]
    version = version_table(tables)
    if not faults and version.name in names:
        found: set[str] = set()
        with suppress(sa.exc.DBAPIError), connection.begin_nested():
            found = set(connection.scalars(sa.select(version.c.version_num)))
        if unknown := found.difference(REVISIONS):
            faults.append(
                f"the tables are at revision {', '.join(sorted(unknown))}, and this version works "
                f"with {', '.join(REVISIONS)}; where `qmq db migrate` does not know theirs, this "
                "program is the older one and is what to upgrade"
            )
    return SchemaLook(faults, hidden)


def version_table(tables: Tables) -> sa.TableClause:
    """Where `qmq db migrate` records the revision; an application's own Alembic has its own table."""
    prefix = tables.outbox.name.removesuffix("outbox")
    return sa.table(
        f"{prefix}{_VERSION_SUFFIX}",
        sa.column("version_num", sa.String()),
        schema=tables.outbox.schema,
    )
