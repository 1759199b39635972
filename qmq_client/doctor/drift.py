"""Differences between the live tables and those that this version needs, with the statement that fixes each.

For `qmq db check` and the doctor; a producer's check at its first send is in `schema.py`. SQLAlchemy reads the
live tables, Alembic writes the statements. Wider columns, further columns that need no value, and
further indexes are allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, Final

import sqlalchemy as sa
from alembic.operations import Operations, ops
from alembic.runtime.migration import MigrationContext

from qmq_client.outbox.checking.rights import is_denied, is_hidden, user
from qmq_client.outbox.checking.schema import version_table
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.database.table_names import table_text
from qmq_client.outbox.table import REVISIONS, Tables

_MIGRATE: Final = "qmq db migrate"
#: If another history has the tables, which that command would refuse.
_UPGRADE: Final = "alembic upgrade heads, after a new revision if your own metadata has the tables"
#: If another history exists, and the tables have not been created yet.
_EITHER: Final = (
    f"{_MIGRATE}, or that of your own Alembic history if the tables should belong to it"
)
_ALEMBIC_TABLE: Final = "alembic_version"
_SQLITE_FIX: Final = (
    "SQLite cannot change a column: when no row is left in {table}, drop it, and "
    "`qmq db downgrade base` and `qmq db migrate` recreate it"
)
#: Bytes that fit into a type without a length, by its word; other types have a length, or no limit.
_ROOM: Final = {
    "TINYINT": 1,
    "SMALLINT": 2,
    "MEDIUMINT": 3,
    "INTEGER": 4,
    "BIGINT": 8,
    "TINYBLOB": 2**8,
    "BLOB": 2**16,
    "MEDIUMBLOB": 2**24,
    "LONGBLOB": 2**32,
    "TINYTEXT": 2**8,
}
_UNBOUNDED: Final = 2**62
#: Types that lengthen shorter values.
_PADDED: Final = ("CHAR", "BINARY")
#: A user without any right on a table of PostgreSQL gets no row.
_COLLATION: Final = sa.text(
    "SELECT coalesce(collation_name, 'default') FROM information_schema.columns "
    "WHERE table_schema = :schema AND table_name = :table AND column_name = :column"
)
#: Collations of PostgreSQL that are exact and never change.
_LASTING: Final = ("C", "POSIX", "ucs_basic")
#: SQLite does not report a column's collation, but a UNION takes it from its first part: how many
#: different values remain shows which ones the collation merges.
_SQLITE_MERGES: Final = {"NOCASE": "A", "RTRIM": "a "}
_SQLITE_UNION: Final = (
    "SELECT count(*) FROM "
    "(SELECT {column} FROM {table} WHERE 0 UNION SELECT 'a' UNION SELECT '{other}')"
)
#: PostgreSQL keeps an index whose CREATE INDEX CONCURRENTLY was killed.
_UNFINISHED: Final = sa.text(
    "SELECT quote_ident(c.relname) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid "
    "WHERE i.indrelid = to_regclass(:name) AND NOT i.indisvalid ORDER BY 1"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One difference that matters."""

    #: The fault, with the names of table and column.
    fault: str
    #: The statement or command that fixes it.
    remedy: str

    def __str__(self) -> str:
        return f"{self.fault}: {self.remedy}"


def find_drift(connection: sa.Connection, tables: Tables) -> list[Drift]:
    """Every difference; none if the tables match. Reads only the catalog."""
    inspector = sa.inspect(connection)
    names = set(inspector.get_table_names(tables.outbox.schema))
    version = version_table(tables)
    revision = _revision(connection, version) if version.name in names else []
    found = list(_of_revision(revision or []))
    if revision is None:
        found.append(_unread(connection, version))
    # A migration creates tables of later revisions; a missing table of an earlier one was removed.
    is_newest = bool(set(revision or []) & set(REVISIONS))
    migration = None if is_newest else _migration(inspector, tables, names)
    for table in tables.all:
        if table.name in names:
            found += _of_table(connection, inspector, table, migration)
        elif is_hidden(connection, table):
            found.append(_unread(connection, table))
        else:
            create = ops.CreateTableOp.from_table(table)
            fault = f"table {table.fullname} is missing"
            found.append(Drift(fault=fault, remedy=migration or _statement(connection, create)))
    for fault in dialect_of(connection.engine).faults(connection, tables.all):
        text, _, statement = fault.partition(": ")
        found.append(Drift(fault=text, remedy=statement or "upgrade the server"))
    return found


def _revision(connection: sa.Connection, version: sa.TableClause) -> list[str] | None:
    """The revision that `qmq db migrate` recorded; None if this user may not read it.

    An application's own Alembic records it elsewhere.
    """
    try:
        with connection.begin_nested():
            return list(connection.scalars(sa.select(version.c.version_num)))
    except sa.exc.DBAPIError as error:
        if not is_denied(error):
            raise
    return None


def _migration(inspector: sa.Inspector, tables: Tables, names: set[str]) -> str:
    """The remedy that updates the tables: another history, if that seems to have created them or may do so."""
    # A query of this table by name fails on MySQL for a user without rights on it; a list only leaves it out.
    places = {None, tables.outbox.schema}
    is_other = any(_ALEMBIC_TABLE in inspector.get_table_names(place) for place in places)
    if not is_other or version_table(tables).name in names:
        return _MIGRATE
    return _UPGRADE if tables.outbox.name in names else _EITHER


def _unread(connection: sa.Connection, table: sa.FromClause) -> Drift:
    name, reader = table_text(connection, table), user(connection)
    return Drift(
        fault=f"table {name} was not checked: {reader} may not read it",
        remedy=f"GRANT SELECT ON {name} TO {reader}",
    )


def _of_revision(revision: list[str]) -> Iterator[Drift]:
    for unknown in sorted(set(revision).difference(REVISIONS)):
        yield Drift(
            fault=f"the tables are at revision {unknown}, not at {', '.join(REVISIONS)}",
            remedy=f"{_MIGRATE}, or upgrade the product if it does not know that revision",
        )


def _of_table(
    connection: sa.Connection, inspector: sa.Inspector, table: sa.Table, migration: str | None
) -> Iterator[Drift]:
    live = {column["name"]: column for column in inspector.get_columns(table.name, table.schema)}
    for column in table.columns:
        text = f"column {table.fullname}.{column.name}"
        if column.name not in live:
            add = ops.AddColumnOp(table.name, column, schema=table.schema)
            yield Drift(fault=f"{text} is missing", remedy=_statement(connection, add))
            continue
        for fault, change in _column_faults(connection, column, live.pop(column.name)):
            yield Drift(fault=f"{text} {fault}", remedy=_change(connection, column, change))
    for name, extra in live.items():
        if _needs_a_value(extra):
            yield Drift(
                fault=f"column {table.fullname}.{name} does not belong to QMQ and has no default, so that "
                "every INSERT fails",
                remedy="give it a default, or make it nullable",
            )
    yield from _of_keys(connection, inspector, table)
    yield from _of_indexes(connection, inspector, table, migration)


def _type_text(type_: Any, dialect: sa.Dialect) -> str:
    """The type in SQL; `NULL` for a missing type, or one that SQLAlchemy does not know."""
    return (
        str(sa.null().type)
        if isinstance(type_, sa.types.NullType)
        else type_.compile(dialect=dialect)
    )


def _column_faults(
    connection: sa.Connection, column: sa.Column[Any], live: Any
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The faults of a live column, as the inspector describes it, with the modification; {}: make
    it an identity column.
    """
    dialect = connection.dialect
    wanted = column.type.dialect_impl(dialect)
    fault = ""
    if not _holds(live["type"], wanted, dialect):
        has, need = _type_text(live["type"], dialect), _type_text(wanted, dialect)
        fault = f"is {has}, and {need} is needed"
    elif collation := _wrong_collation(connection, column, wanted):
        fault = f"has the collation {collation}"
    if fault:
        yield fault, {"modify_type": column.type}
    if bool(live["nullable"]) != bool(column.nullable):
        fault = "may be NULL" if live["nullable"] else "may not be NULL, but must be nullable"
        yield fault, {"modify_nullable": column.nullable}
    if _is_number(column) and not _is_numbered(dialect, live):
        yield "is not numbered automatically", {}


def _is_number(column: sa.Column[Any]) -> bool:
    return column is column.table.autoincrement_column


def _change(connection: sa.Connection, column: sa.Column[Any], change: dict[str, Any]) -> str:
    table, dialect = column.table, connection.dialect
    if dialect.name == "sqlite":
        return _SQLITE_FIX.format(table=table_text(connection, table))
    if dialect.name != "postgresql":
        change |= {"autoincrement": _is_number(column)}
    elif "modify_type" in change:
        # Without a length: a cast would cut longer values.
        word = _word(column.type.dialect_impl(dialect), dialect)
        change |= {"postgresql_using": f"{column.name}::{word}"}
    elif not change:
        change = {"modify_server_default": sa.Identity()}
    operation = ops.AlterColumnOp(
        table.name,
        column.name,
        schema=table.schema,
        existing_type=column.type,
        existing_nullable=column.nullable,
        **change,
    )
    return _statement(connection, operation)


def _statement(connection: sa.Connection, operation: ops.MigrateOperation) -> str:
    """The statement as one line for people; SQLAlchemy's text for a driver has doubled percent signs."""
    text = StringIO()
    options = {"as_sql": True, "output_buffer": text}
    context = MigrationContext.configure(dialect=connection.dialect, opts=options)
    Operations(context).invoke(operation)
    return " ".join(text.getvalue().replace("%%", "%").split()).removesuffix(";")


def _needs_a_value(column: Any) -> bool:
    is_made = column.get("computed") or column.get("identity") or column.get("autoincrement")
    return not column["nullable"] and column["default"] is None and is_made is not True


def _word(kind_of: Any, dialect: sa.Dialect) -> str:
    """The name of a type, without its length and collation."""
    text: str = kind_of.compile(dialect=dialect)
    return text.partition("(")[0].partition(" ")[0]


def _holds(live: Any, wanted: Any, dialect: sa.Dialect) -> bool:
    """Whether a live type stores every value of QMQ unchanged."""
    try:
        if live.python_type is not wanted.python_type:
            return False
    except NotImplementedError:  # a type that SQLAlchemy does not know
        return False
    if dialect.name == "sqlite":  # it accepts any length
        return True
    has, need = _room(live, dialect), _room(wanted, dialect)
    is_padded = _word(live, dialect) in _PADDED
    return has == need and _word(wanted, dialect) in _PADDED if is_padded else has >= need


def _room(kind_of: Any, dialect: sa.Dialect) -> int:
    length: int | None = getattr(kind_of, "length", None)
    return length or _ROOM.get(_word(kind_of, dialect), _UNBOUNDED)


def _wrong_collation(connection: sa.Connection, column: sa.Column[Any], wanted: Any) -> str:
    """The live collation and its fault; empty for a good one. Text is only displayed; names are compared."""
    kind, is_name = (
        connection.dialect.name,
        isinstance(wanted, sa.String) and not isinstance(wanted, sa.Text),
    )
    if kind == "sqlite":
        found = _merging(connection, column) if is_name else ""
        return found and f"{found}, which is not exact"
    if not getattr(wanted, "collation", None):
        return ""
    place = {
        "schema": column.table.schema or connection.dialect.default_schema_name,
        "table": column.table.name,
        "column": column.name,
    }
    found = connection.scalar(_COLLATION, place)
    if found is None or found in _LASTING:
        return ""
    if kind == "postgresql":  # most compare exactly, but use the operating system's order
        return f"{found}, whose order an upgrade of the system may change"
    if not found.startswith((wanted.collation.split("_")[0], "utf8mb4")):
        return f"{found}, which lacks characters that QMQ stores"
    return f"{found}, which is not exact" if is_name and not found.endswith("_bin") else ""


def _merging(connection: sa.Connection, column: sa.Column[Any]) -> str:
    """The collation of a column of SQLite under which different names are equal."""
    table = table_text(connection, column.table)
    for collation, other in _SQLITE_MERGES.items():
        union = _SQLITE_UNION.format(column=column.name, table=table, other=other)
        if connection.exec_driver_sql(union).scalar() == 1:
            return collation
    return ""


def _is_numbered(dialect: sa.Dialect, live: Any) -> bool:
    if dialect.name == "sqlite":  # only a column of exactly this type is the row id
        return str(live["type"]) == "INTEGER" and bool(live["primary_key"])
    return bool(live.get("autoincrement") or live.get("identity"))


def _of_keys(
    connection: sa.Connection, inspector: sa.Inspector, table: sa.Table
) -> Iterator[Drift]:
    name = table_text(connection, table)
    wanted = table.primary_key.columns.keys()
    key = inspector.get_pk_constraint(table.name, table.schema)["constrained_columns"]
    if sorted(key) != sorted(wanted):
        has, columns = ", ".join(key), ", ".join(wanted)
        add = f"ALTER TABLE {name} ADD PRIMARY KEY ({columns})"
        yield Drift(
            fault=f"table {table.fullname} has the primary key ({has}), not ({columns})",
            remedy=f"{add}, after the current one was dropped" if key else add,
        )


def _of_indexes(
    connection: sa.Connection, inspector: sa.Inspector, table: sa.Table, migration: str | None
) -> Iterator[Drift]:
    live: list[Any] = [*inspector.get_indexes(table.name, table.schema)]
    live += [
        {**key, "unique": True}
        for key in inspector.get_unique_constraints(table.name, table.schema)
    ]
    for wanted in _wanted_indexes(table):
        columns = wanted.to_index().columns.keys()
        if any(_serves(each, columns, wanted) for each in live):
            continue
        fault, remedy = f"has no index on ({', '.join(columns)})", migration
        if wanted.unique:
            fault, remedy = f"may hold the same {', '.join(columns)} twice", None
        create = _statement(connection, wanted)
        if any(each["name"] == wanted.index_name for each in live):
            drop = ops.DropIndexOp(str(wanted.index_name), table.name, schema=table.schema)
            remedy = f"{_statement(connection, drop)}; {create}"
        yield Drift(fault=f"table {table.fullname} {fault}", remedy=remedy or create)
    if connection.dialect.name == "postgresql":
        for name in connection.scalars(_UNFINISHED, {"name": table_text(connection, table)}):
            fault = f"index {name} was never finished and is not used"
            yield Drift(fault=fault, remedy=f"REINDEX INDEX {name}")


def _wanted_indexes(table: sa.Table) -> Iterator[ops.CreateIndexOp]:
    for index in sorted(table.indexes, key=lambda index: str(index.name)):
        yield ops.CreateIndexOp.from_index(index)
    for constraint in table.constraints:
        if isinstance(constraint, sa.UniqueConstraint):
            columns = constraint.columns.keys()
            name = f"{table.name}_{'_'.join(columns)}"
            yield ops.CreateIndexOp(name, table.name, columns, schema=table.schema, unique=True)


def _serves(live: Any, columns: Sequence[str], wanted: ops.CreateIndexOp) -> bool:
    """Whether a live index makes rows unique, or can be used for a search by `columns`."""
    options = ("postgresql_where", "sqlite_where")
    found = (live.get("dialect_options", {}).get(option) for option in options)
    condition = next((str(each) for each in found if each is not None), "")
    if wanted.unique:
        return bool(live["unique"]) and not condition and live["column_names"] == columns
    is_partial = any(option in wanted.kw for option in options)
    is_whole = not condition or (is_partial and "is not null" in condition.lower())
    return is_whole and live["column_names"][: len(columns)] == columns
