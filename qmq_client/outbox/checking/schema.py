"""Checks that the tables of a database match this version.

Checks only presence and revision, and faults of a server or table that break a promise, because the
check delays the first send of each process and the first sweep; `qmq db check` also compares types,
sizes, indexes and collations.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import sqlalchemy as sa

from qmq_client.errors import OutboxMissingError
from qmq_client.outbox.checking.rights import Rights, Role, is_denied, is_hidden, lacking_texts
from qmq_client.outbox.database.dialect import OutboxDialect
from qmq_client.outbox.table import REVISIONS, Tables

_MAKE_TABLES = (
    " Run `qmq db migrate`, or your own migrations if they include the tables; for a first try "
    "`qmq_client.create_tables(engine)` or `await qmq_client.create_tables_async(engine)`."
)

_VERSION_SUFFIX = "version"


@dataclass(frozen=True, slots=True)
class Faults:
    """The reasons why the tables cannot be used, and the remedy."""

    texts: list[str]
    remedy: str


def faults_of(
    connection: sa.Connection,
    dialect: OutboxDialect,
    tables: Tables,
    needed: Sequence[sa.Table],
    role: Role,
    asks_rights: bool,
) -> Faults | None:
    """The faults of the needed tables, or None. Only reads; does not affect an open transaction.

    With `asks_rights`, or if a table is hidden, also the rights of its role that this user lacks.
    """
    look = look_at_schema(connection, tables, needed)
    if look.faults:
        return Faults(look.faults, _MAKE_TABLES)
    texts = dialect.faults(connection, needed)  # they explain missing tables better
    if not texts and (asks_rights or look.hidden):
        texts = lacking_texts(connection, role, Rights(connection).lacking(role, tables))
    return Faults(texts, "") if texts else None


def missing_error(engine: sa.Engine, faults: Faults) -> OutboxMissingError:
    """The error for tables that cannot be used."""
    database = engine.url.render_as_string(hide_password=True)
    return OutboxMissingError(f"{'; '.join(faults.texts)} in {database}.{faults.remedy}")


@dataclass(frozen=True, slots=True)
class SchemaLook:
    """The result of checking QMQ's tables."""

    #: Each missing table and column, and an unknown revision; one text each.
    faults: list[str]
    #: Tables that the server may hide from this user.
    hidden: list[sa.Table]


def look_at_schema(
    connection: sa.Connection, tables: Tables, needed: Sequence[sa.Table]
) -> SchemaLook:
    """Check the needed tables. A revision that this user may not read is ignored."""
    faults: list[str] = []
    hidden: list[sa.Table] = []
    inspector = sa.inspect(connection)
    schema = tables.outbox.schema
    for table in needed:
        # One by one: `sql_select_limit` of MySQL would cut a list of all short.
        if not _has_table(inspector, table.name, schema):
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
    if not faults and _has_table(inspector, version.name, schema):
        found: set[str] = set()
        with suppress(sa.exc.DBAPIError), connection.begin_nested():
            found = set(connection.scalars(sa.select(version.c.version_num)))
        if unknown := found.difference(REVISIONS):
            faults.append(
                f"the tables are at revision {', '.join(sorted(unknown))}, and this version works "
                f"with {', '.join(REVISIONS)}; if `qmq db migrate` does not know "
                "that revision, this program is older and must be upgraded"
            )
    return SchemaLook(faults, hidden)


def _has_table(inspector: sa.Inspector, name: str, schema: str | None) -> bool:
    try:
        return inspector.has_table(name, schema)
    except sa.exc.DBAPIError as error:
        if error.connection_invalidated or not is_denied(error):
            raise
        return False  # MySQL denies access to it


def version_table(tables: Tables) -> sa.TableClause:
    """Where `qmq db migrate` records the revision; an application's own Alembic has its own table."""
    prefix = tables.outbox.name.removesuffix("outbox")
    return sa.table(
        f"{prefix}{_VERSION_SUFFIX}",
        sa.column("version_num", sa.String()),
        schema=tables.outbox.schema,
    )
