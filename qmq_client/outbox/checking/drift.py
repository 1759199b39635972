"""How a live table differs from what we need: for `qmq db check`, and for the doctor.

Checks more than each start does (`schema.py`): types and sizes, nullability, keys, indexes, engine
and collations, each fault with the command or statement that fixes it. Wider columns, further
columns that need no value, and further indexes are the application's own business.

Compares one live column with the one we need: what it holds, and which values it merges.

Databases spell types in many ways, so the type's words are not compared, but three facts: the sort
of value, how much of it fits, and whether comparison is exact. More room than needed is no fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.outbox.checking.rights import is_denied, is_hidden, user
from qmq_client.outbox.checking.schema import version_table
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.database.table_names import table_text
from qmq_client.outbox.table import REVISIONS, Tables

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
        "`qmq db downgrade base` and `qmq db migrate` recreate it"
    )


def _specification(connection: sa.Connection, column: sa.Column[Any]) -> str:
    return statement_text(connection, sa.schema.CreateColumn(column))


def _table(connection: sa.Connection, column: sa.Column[Any]) -> str:
    return table_text(connection, column.table)


def statement_text(connection: sa.Connection, element: sa.sql.ClauseElement) -> str:
    """One line for a person; SQLAlchemy's own text is for a driver, which needs percent signs doubled."""
    text = str(element.compile(dialect=connection.dialect)).replace("%%", "%")
    return " ".join(text.split())


_MIGRATE: Final = "qmq db migrate"
#: Where another history has the tables: that command would refuse them.
_UPGRADE: Final = "alembic upgrade heads, after a new revision if your own metadata has the tables"
#: Where another history is, and nobody has made the tables yet.
_EITHER: Final = f"{_MIGRATE}, or that of your own Alembic history if it is to have the tables"
_ALEMBIC_TABLE: Final = "alembic_version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One difference that matters."""

    #: What is wrong, with the names of table and column.
    fault: str
    #: The statement or command that fixes it.
    remedy: str

    def __str__(self) -> str:
        return f"{self.fault}: {self.remedy}"


def find_drift(connection: sa.Connection, tables: Tables) -> list[Drift]:
    """Every difference; none if all is as it should be. Reads only the catalog."""
    inspector = sa.inspect(connection)
    names = set(inspector.get_table_names(tables.outbox.schema))
    version = version_table(tables)
    revision = _revision(connection, version) if version.name in names else []
    found = list(_of_revision(revision or []))
    if revision is None:
        found.append(_unread(connection, version))
    # A migration creates what later revisions add; what an earlier one added was removed by somebody.
    is_newest = bool(set(revision or []) & set(REVISIONS))
    migration = None if is_newest else _migration(inspector, tables, names)
    for table in tables.all:
        if table.name in names:
            found += _of_table(connection, table, migration)
        elif is_hidden(connection, table):
            found.append(_unread(connection, table))
        else:
            create = statement_text(connection, sa.schema.CreateTable(table))
            fault = f"table {table.fullname} is missing"
            found.append(Drift(fault=fault, remedy=migration or create))
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
    """What brings the tables up to date: another history, if that seems to have created them or may yet."""
    # Asked for by name, MySQL refuses a user who has no rights on it; a list leaves it out.
    places = {None, tables.outbox.schema}
    is_other = any(_ALEMBIC_TABLE in inspector.get_table_names(place) for place in places)
    if not is_other or version_table(tables).name in names:
        return _MIGRATE
    return _UPGRADE if tables.outbox.name in names else _EITHER


def _unread(connection: sa.Connection, table: sa.FromClause) -> Drift:
    name, reader = table_text(connection, table), user(connection)
    return Drift(
        fault=f"table {name} was not looked at: {reader} may not read it",
        remedy=f"GRANT SELECT ON {name} TO {reader}",
    )


def _of_revision(revision: list[str]) -> Iterator[Drift]:
    for unknown in sorted(set(revision).difference(REVISIONS)):
        yield Drift(
            fault=f"the tables are at revision {unknown}, not at {', '.join(REVISIONS)}",
            remedy=f"{_MIGRATE}, or upgrade the product where it does not know that revision",
        )


def _of_table(connection: sa.Connection, table: sa.Table, migration: str | None) -> Iterator[Drift]:
    inspector = sa.inspect(connection)
    live = {column["name"]: column for column in inspector.get_columns(table.name, table.schema)}
    for column in table.columns:
        if column.name not in live:
            yield Drift(
                fault=f"column {table.fullname}.{column.name} is missing",
                remedy=f"ALTER TABLE {table_text(connection, table)} ADD COLUMN "
                + statement_text(connection, sa.schema.CreateColumn(column)),
            )
            continue
        for fault, remedy in compare_column(connection, column, live[column.name]):
            yield Drift(fault=f"column {table.fullname}.{column.name} {fault}", remedy=remedy)
    ours = {column.name for column in table.columns}
    for name, extra in live.items():
        if name not in ours and _needs_a_value(extra):
            yield Drift(
                fault=f"column {table.fullname}.{name} is not ours and has no default, so that "
                "every INSERT fails",
                remedy="give it a default, or make it nullable",
            )
    if ours <= set(live):
        yield from _of_keys(connection, table)
        yield from _of_indexes(connection, table, migration)


def _needs_a_value(column: Any) -> bool:
    is_made = column.get("computed") or column.get("identity") or column.get("autoincrement")
    return not column["nullable"] and column["default"] is None and is_made is not True


def _of_keys(connection: sa.Connection, table: sa.Table) -> Iterator[Drift]:
    wanted = [column.name for column in table.primary_key.columns]
    inspector = sa.inspect(connection)
    key = inspector.get_pk_constraint(table.name, table.schema)["constrained_columns"]
    name = table_text(connection, table)
    columns = ", ".join(wanted)
    if sorted(key) != sorted(wanted):
        add = f"ALTER TABLE {name} ADD PRIMARY KEY ({columns})"
        yield Drift(
            fault=f"table {table.fullname} has the primary key ({', '.join(key)}), not ({columns})",
            remedy=f"{add}, after the present one was dropped" if key else add,
        )
    unique = {tuple(each["column_names"]) for each in _unique(inspector, table)}
    for constraint in table.constraints:
        if not isinstance(constraint, sa.UniqueConstraint):
            continue
        columns = ", ".join(constraint.columns.keys())
        if tuple(constraint.columns.keys()) not in unique:
            index = _name_text(connection, f"{table.name}_{columns.replace(', ', '_')}")
            yield Drift(
                fault=f"table {table.fullname} may hold the same {columns} twice",
                remedy=f"CREATE UNIQUE INDEX {index} ON {name} ({columns})",
            )


def _unique(inspector: sa.Inspector, table: sa.Table) -> Iterator[Any]:
    yield from inspector.get_unique_constraints(table.name, table.schema)
    for index in inspector.get_indexes(table.name, table.schema):
        if index["unique"] and not _condition(index):
            yield index


def _of_indexes(
    connection: sa.Connection, table: sa.Table, migration: str | None
) -> Iterator[Drift]:
    inspector = sa.inspect(connection)
    live = inspector.get_indexes(table.name, table.schema)
    invalid = _invalid_indexes(connection, table)
    for index in sorted(table.indexes, key=lambda index: str(index.name)):
        columns = [column.name for column in index.columns]
        serving = [each for each in live if _serves(each, index, columns)]
        create = statement_text(connection, sa.schema.CreateIndex(index))
        if not serving:
            is_taken = any(each["name"] == index.name for each in live)
            drop = statement_text(connection, sa.schema.DropIndex(index)) + "; " if is_taken else ""
            remedy = migration if migration and not is_taken else drop + create
            text = f"table {table.fullname} has no index on ({', '.join(columns)})"
            yield Drift(fault=text, remedy=remedy)
        elif all(each["name"] in invalid for each in serving):
            yield Drift(
                fault=f"index {serving[0]['name']} was never finished and is not used",
                remedy=f"REINDEX INDEX {_name_text(connection, str(serving[0]['name']))}",
            )


def _name_text(connection: sa.Connection, name: str) -> str:
    return connection.dialect.identifier_preparer.quote(name).replace("%%", "%")


def _serves(live: Any, index: sa.Index, columns: list[str]) -> bool:
    """Whether a search by `columns` may use it: they come first, and none of our rows is left out."""
    if live["column_names"][: len(columns)] != columns:
        return False
    condition = _condition(live)
    wanted = any(index.dialect_options[name].get("where") is not None for name in _PARTIAL)
    return not condition or (wanted and "is not null" in str(condition).lower())


_PARTIAL: Final = ("postgresql", "sqlite")


def _condition(live: Any) -> Any:
    options = live.get("dialect_options", {})
    found = [options.get(f"{name}_where") for name in _PARTIAL]
    return next((str(each) for each in found if each is not None), "")


def _invalid_indexes(connection: sa.Connection, table: sa.Table) -> set[str]:
    """PostgreSQL keeps an index whose CREATE INDEX CONCURRENTLY was killed."""
    if connection.dialect.name != "postgresql":
        return set()
    query = sa.text(
        "SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid "
        "WHERE i.indrelid = to_regclass(:name) AND NOT i.indisvalid"
    )
    return set(connection.scalars(query, {"name": table_text(connection, table)}))
