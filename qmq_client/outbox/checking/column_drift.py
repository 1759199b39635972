"""Compares one live column with the one we need: what it holds, and which values it merges.

Databases spell types in many ways, so the type's words are not compared, but three facts: the sort
of value, how much of it fits, and whether comparison is exact. More room than needed is no fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.outbox.database.table_names import table_text

#: Bytes of an integer type, by the databases' words for it.
_INTEGER_BYTES: Final = {
    "TINYINT": 1,
    "SMALLINT": 2,
    "MEDIUMINT": 3,
    "INTEGER": 4,
    "INT": 4,
    "BIGINT": 8,
}
#: Capacity of MySQL's types that have no length.
_MYSQL_BYTES: Final = {
    "TINYBLOB": 2**8 - 1,
    "BLOB": 2**16 - 1,
    "MEDIUMBLOB": 2**24 - 1,
    "LONGBLOB": 2**32 - 1,
    "TINYTEXT": 2**8 - 1,
    "TEXT": 2**16 - 1,
    "MEDIUMTEXT": 2**24 - 1,
    "LONGTEXT": 2**32 - 1,
}
_UNBOUNDED: Final = 2**62
_MYSQL: Final = ("mysql", "mariadb")
_POSTGRESQL_COLLATION: Final = (
    "SELECT c.collname FROM pg_attribute a JOIN pg_collation c ON c.oid = a.attcollation "
    "WHERE a.attrelid = to_regclass(:path) AND a.attname = :column"
)
#: The inspector leaves out a collation that is the default of its character set.
_MYSQL_COLLATION: Final = (
    "SELECT collation_name FROM information_schema.columns "
    "WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name = :table "
    "AND column_name = :column"
)
#: SQLite does not report a column's collation, but a UNION takes it from its first part. The query
#: counts how many different values remain, and which two became one.
_SQLITE_MERGES: Final = (
    ("NOCASE", "SELECT {column} FROM {table} WHERE 0 UNION SELECT 'a' UNION SELECT 'A'"),
    ("RTRIM", "SELECT {column} FROM {table} WHERE 0 UNION SELECT 'a' UNION SELECT 'a '"),
)
#: Collations of PostgreSQL that are as exact as ours and never change.
_LASTING: Final = ("C", "POSIX", "ucs_basic")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What a type says about its values."""

    #: "integer", "bytes", "text", or the type's own word.
    sort: str
    #: Capacity in bytes, or in characters of text.
    room: int
    #: Shorter values are padded.
    is_padded: bool = False


def compare_column(
    connection: sa.Connection, column: sa.Column[Any], live: Any
) -> Iterator[tuple[str, str]]:
    """Each fault of the live column, as the inspector describes it, with the statement that fixes it."""
    kind = connection.dialect.name
    wanted = column.type.dialect_impl(connection.dialect)
    need, has = _shape(wanted, kind), _shape(live["type"], kind)
    fault = ""
    if need.sort != has.sort:
        fault = f"is {live['type']!s}, which does not hold {need.sort}"
    elif has.room < need.room:
        fault = f"is {live['type']!s}: it holds {has.room:,}, and {need.room:,} are needed"
    elif has.is_padded and (has.room != need.room or not need.is_padded):
        fault = f"is {live['type']!s}, which lengthens what is stored"
    elif collation := _wrong_collation(connection, column):
        fault = f"has the collation {collation}"
    if fault:
        yield fault, _change_type(connection, column, is_cast=need.sort != has.sort)
    if bool(live["nullable"]) != bool(column.nullable):
        problem = "may be NULL" if live["nullable"] else "may not be NULL, and for us it must"
        yield problem, _change_null(connection, column)
    if column.autoincrement is True and not _is_numbered(connection, live):
        yield "gets no number by itself", _number(connection, column)


def _shape(kind_of: Any, dialect_name: str) -> _Shape:
    word = type(kind_of).__visit_name__.upper().replace("BIG_INTEGER", "BIGINT")
    word = word.replace("SMALL_INTEGER", "SMALLINT")
    is_mysql = dialect_name in _MYSQL
    if isinstance(kind_of, sa.Integer):
        # SQLite stores every integer in as many bytes as it needs.
        room = 8 if dialect_name == "sqlite" else _INTEGER_BYTES.get(word, 4)
        return _Shape(sort="integer", room=room)
    if kind_of.python_type is bytes:
        room = _MYSQL_BYTES.get(word, kind_of.length or _UNBOUNDED) if is_mysql else _UNBOUNDED
        return _Shape(sort="bytes", room=room, is_padded=word == "BINARY")
    if isinstance(kind_of, sa.String):
        room = kind_of.length or (_MYSQL_BYTES.get(word, _UNBOUNDED) if is_mysql else _UNBOUNDED)
        is_unchecked = dialect_name == "sqlite"
        is_padded = word == "CHAR" and not is_unchecked
        return _Shape(sort="text", room=_UNBOUNDED if is_unchecked else room, is_padded=is_padded)
    return _Shape(sort=word.lower(), room=_UNBOUNDED)


def _wrong_collation(connection: sa.Connection, column: sa.Column[Any]) -> str:
    """The live collation and its fault; empty for a good one."""
    if connection.dialect.name == "sqlite":
        return _merging(connection, column)
    wanted = getattr(column.type.dialect_impl(connection.dialect), "collation", None)
    if wanted is None:
        return ""
    if connection.dialect.name == "postgresql":
        found = _live(connection, column, _POSTGRESQL_COLLATION)
        # Most of them compare exactly, but take their order from the operating system.
        return (
            "" if found in _LASTING else f"{found}, whose order an upgrade of the system may change"
        )
    found = _live(connection, column, _MYSQL_COLLATION)
    if not found.startswith((wanted.split("_")[0], "utf8mb4")):
        return f"{found}, which lacks characters that we store"
    # Text is only displayed; names are compared.
    is_good = isinstance(column.type, sa.Text) or found.endswith("_bin")
    return "" if is_good else f"{found}, which is not exact"


def _merging(connection: sa.Connection, column: sa.Column[Any]) -> str:
    """Values that SQLite's collation of a name merges; text is only displayed, and bytes have no collation."""
    if not isinstance(column.type, sa.String) or isinstance(column.type, sa.Text):
        return ""
    table = _table(connection, column)
    for collation, union in _SQLITE_MERGES:
        values = union.format(column=column.name, table=table)
        if connection.exec_driver_sql(f"SELECT count(*) FROM ({values})").scalar() == 1:
            return f"{collation}, which is not exact"
    return ""


def _live(connection: sa.Connection, column: sa.Column[Any], query: str) -> str:
    values = {
        "path": _table(connection, column),
        "schema": column.table.schema,
        "table": column.table.name,
        "column": column.name,
    }
    text = sa.text(query)
    used = {name: values[name] for name in text.compile().params}
    return connection.execute(text, used).scalar() or "of the database"


def _is_numbered(connection: sa.Connection, live: Any) -> bool:
    if connection.dialect.name == "sqlite":
        # Only a column of exactly this type is the row's own number.
        return str(live["type"]) == "INTEGER" and bool(live.get("primary_key"))
    return bool(live.get("autoincrement") or live.get("identity"))


def _change_type(connection: sa.Connection, column: sa.Column[Any], *, is_cast: bool) -> str:
    specification = _specification(connection, column)
    table = _table(connection, column)
    if connection.dialect.name in _MYSQL:
        return f"ALTER TABLE {table} MODIFY COLUMN {specification}"
    if connection.dialect.name == "postgresql":
        text = column.type.compile(dialect=connection.dialect)
        cast = f" USING {column.name}::{text.partition(' ')[0]}" if is_cast else ""
        return f"ALTER TABLE {table} ALTER COLUMN {column.name} TYPE {text}{cast}"
    return _anew(table)


def _change_null(connection: sa.Connection, column: sa.Column[Any]) -> str:
    table = _table(connection, column)
    if connection.dialect.name in _MYSQL:
        return f"ALTER TABLE {table} MODIFY COLUMN {_specification(connection, column)}"
    if connection.dialect.name == "postgresql":
        verb = "DROP" if column.nullable else "SET"
        return f"ALTER TABLE {table} ALTER COLUMN {column.name} {verb} NOT NULL"
    return _anew(table)


def _number(connection: sa.Connection, column: sa.Column[Any]) -> str:
    table = _table(connection, column)
    if connection.dialect.name in _MYSQL:
        return f"ALTER TABLE {table} MODIFY COLUMN {_specification(connection, column)}"
    if connection.dialect.name == "postgresql":
        identity = "ADD GENERATED BY DEFAULT AS IDENTITY"
        return f"ALTER TABLE {table} ALTER COLUMN {column.name} {identity}"
    return _anew(table)


def _anew(table: str) -> str:
    return (
        f"SQLite cannot change a column: when no row is left in {table}, drop it, and "
        "`qmq db downgrade base` and `qmq db migrate` make it anew"
    )


def _specification(connection: sa.Connection, column: sa.Column[Any]) -> str:
    return statement_text(connection, sa.schema.CreateColumn(column))


def _table(connection: sa.Connection, column: sa.Column[Any]) -> str:
    return table_text(connection, column.table)


def statement_text(connection: sa.Connection, element: sa.sql.ClauseElement) -> str:
    """One line for a person; SQLAlchemy's own text is for a driver, which needs percent signs doubled."""
    text = str(element.compile(dialect=connection.dialect)).replace("%%", "%")
    return " ".join(text.split())
