"""What is looked at before the first step: whether tables and history that are there are ours.

A migration that goes on with tables of another history would make that history wrong: the
application's `alembic check` then finds our version table, and its next autogenerate drops it.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from qmq_migrations.errors import OtherHistoryError, SchemaMissingError, TablesGoneError

#: Where Alembic notes an application's own revision, unless it was told another name.
ALEMBIC_TABLE: Final = "alembic_version"
#: What each revision leaves behind, without the prefix.
TABLES_OF: Final = {
    "qmq0001": ("inbox", "outbox"),
    "qmq0002": ("inbox", "order_lock", "outbox"),
}


def refuse_missing_schema(connection: sa.Connection, schema: str | None) -> None:
    """Raise `SchemaMissingError` with the statement that makes it."""
    if schema is None or sa.inspect(connection).has_schema(schema):
        return
    kind = "DATABASE" if connection.dialect.name in ("mysql", "mariadb") else "SCHEMA"
    name = connection.dialect.identifier_preparer.quote_identifier(schema)
    raise SchemaMissingError(
        f"there is no schema {schema}, or this user may not see it. Make it first: "
        f"CREATE {kind} {name}"
    )


def refuse_missing_tables(
    connection: sa.Connection, revision: str | None, schema: str | None, prefix: str
) -> None:
    """Raise `TablesGoneError` where tables of the noted revision are gone.

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
        f"revision {revision} is noted, but {', '.join(gone)} not there. Restore what they held "
        f"from a backup; or have them made anew and empty: {forget}, then run `qmq db migrate`"
    )


def will_adopt(
    connection: sa.Connection, schema: str | None, prefix: str, *, may_adopt: bool
) -> bool:
    """Whether tables without a revision of ours are there, to be taken over.

    Requires: no revision is noted. Raises `OtherHistoryError` unless `may_adopt` where another
    history is beside them.
    """
    inspector = sa.inspect(connection)
    if not inspector.has_table(f"{prefix}outbox", schema=schema):
        return False
    # A run of ours that was killed on MySQL left it behind empty: nobody else's then.
    is_begun = inspector.has_table(f"{prefix}version", schema=schema)
    is_other = any(inspector.has_table(ALEMBIC_TABLE, schema=place) for place in {None, schema})
    if is_other and not is_begun and not may_adopt:
        raise OtherHistoryError(
            f"{prefix}outbox is there without a revision of ours, and beside it {ALEMBIC_TABLE}: "
            "an Alembic of the application seems to have made it. Stay with one door: (1) our "
            "tables in the application's metadata and migrations, or (2) our branch beside them, "
            "`alembic upgrade qmq@head`; then `qmq db check` is all that is needed here. Or (3) "
            "`qmq db migrate --adopt` takes them over, and the application's autogenerate has to "
            f"leave out {prefix}version and the others. See docs/migrations.md"
        )
    return True
