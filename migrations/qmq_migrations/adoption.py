"""Checks before the first step whether existing tables and revisions belong to QMQ.

A migration that continued with another history's tables would break that history: the application's
`alembic check` would find QMQ's version table, and its next autogenerate would drop it.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from qmq_migrations.errors import (
    OtherHistoryError,
    SchemaMissingError,
    TablesGoneError,
    UnrecordedTablesError,
)

#: Where Alembic records an application's own revision, unless it is configured otherwise.
ALEMBIC_TABLE: Final = "alembic_version"
#: The tables that each revision leaves behind, without the prefix.
TABLES_OF: Final = {
    "qmq0001": ("inbox", "outbox"),
    "qmq0002": ("inbox", "order_lock", "outbox"),
}


def refuse_missing_schema(connection: sa.Connection, schema: str | None) -> None:
    """Raise `SchemaMissingError` with the statement that creates it."""
    if schema is None or sa.inspect(connection).has_schema(schema):
        return
    kind = "DATABASE" if connection.dialect.name in ("mysql", "mariadb") else "SCHEMA"
    name = connection.dialect.identifier_preparer.quote_identifier(schema)
    raise SchemaMissingError(
        f"There is no schema {schema}, or this user may not see it. Create it first: "
        f"CREATE {kind} {name}"
    )


def refuse_missing_tables(
    connection: sa.Connection, revision: str | None, schema: str | None, prefix: str
) -> None:
    """Raise `TablesGoneError` if tables of the recorded revision are missing.

    An upgrade would find nothing to do, and nothing could be sent.
    """
    wanted = [f"{prefix}{name}" for name in TABLES_OF.get(revision or "", ())]
    there = set(sa.inspect(connection).get_table_names(schema)) if wanted else set()
    gone = [name for name in wanted if name not in there]
    if not gone:
        return
    version = sa.table(f"{prefix}version", schema=schema)
    forget = sa.delete(version).compile(dialect=connection.dialect)
    raise TablesGoneError(
        f"Revision {revision} is recorded, but {', '.join(gone)} not there. Restore them from a "
        f"backup; or create them again, empty: {forget}, then run `qmq db migrate`"
    )


def refuse_unrecorded_tables(connection: sa.Connection, schema: str | None, prefix: str) -> None:
    """Raise `UnrecordedTablesError` if QMQ's tables exist. Requires: no revision is recorded."""
    if sa.inspect(connection).has_table(f"{prefix}outbox", schema=schema):
        raise UnrecordedTablesError(
            f"{prefix}outbox is there, but no revision of QMQ to go back from: your own Alembic "
            "history or create_tables has made it. Go back with that history (`alembic downgrade`), "
            "or take the tables over with `qmq db migrate` before. See docs/migrations.md"
        )


def will_adopt(
    connection: sa.Connection, schema: str | None, prefix: str, *, may_adopt: bool
) -> bool:
    """Whether there are QMQ tables without a revision, to be adopted.

    Requires: no revision is recorded. Raises `OtherHistoryError` if another history is next to them,
    unless `may_adopt`.
    """
    inspector = sa.inspect(connection)
    if not inspector.has_table(f"{prefix}outbox", schema=schema):
        return False
    # A killed migration on MySQL has left the version table, empty; no other program creates it.
    is_begun = inspector.has_table(f"{prefix}version", schema=schema)
    is_other = any(inspector.has_table(ALEMBIC_TABLE, schema=place) for place in {None, schema})
    if is_other and not is_begun and not may_adopt:
        raise OtherHistoryError(
            f"{prefix}outbox exists without a revision of QMQ, next to a table {ALEMBIC_TABLE}: your "
            "own Alembic history seems to have created it. If so, keep to that, whether the tables "
            "are (1) in your metadata or (2) on our branch (`alembic upgrade qmq@head`), and only "
            "run `qmq db check` here. Or (3) let `qmq db migrate --adopt` take them over; your "
            f"autogenerate must then ignore {prefix}version and the others. See docs/migrations.md"
        )
    return True
