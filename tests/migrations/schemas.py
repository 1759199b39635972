"""What a server says of its tables, as exactly as it can, and engines that look like a user's."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa

#: Every fact that PostgreSQL would need to make the table again.
_POSTGRESQL_COLUMNS: Final = """
SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, o.collname,
       pg_get_expr(d.adbin, d.adrelid) LIKE 'nextval(%%' AS is_numbered
FROM pg_attribute a
LEFT JOIN pg_collation o ON o.oid = a.attcollation
LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = to_regclass('{name}') AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""
_POSTGRESQL_INDEXES: Final = "SELECT indexdef FROM pg_indexes WHERE tablename = '{name}' ORDER BY 1"
_POSTGRESQL_CONSTRAINTS: Final = (
    "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint "
    "WHERE conrelid = to_regclass('{name}') ORDER BY 1"
)


def live_schema(engine: sa.Engine) -> dict[str, Any]:
    """Each table but the one of revisions, in the server's own words."""
    read = {"sqlite": _sqlite, "mysql": _mysql, "postgresql": _postgresql}[engine.dialect.name]
    with engine.connect() as connection:
        names = sorted(sa.inspect(connection).get_table_names())
        return {name: read(connection, name) for name in names if not name.endswith("version")}


def _sqlite(connection: sa.Connection, name: str) -> Any:
    query = f"SELECT name, sql FROM sqlite_master WHERE tbl_name = '{name}' ORDER BY name"
    found = connection.exec_driver_sql(query)
    return [(row.name, " ".join((row.sql or "").split())) for row in found]


def _mysql(connection: sa.Connection, name: str) -> Any:
    text: str = connection.exec_driver_sql(f"SHOW CREATE TABLE {name}").one()[1]
    return sorted(line.rstrip(",") for line in text.splitlines())


def _postgresql(connection: sa.Connection, name: str) -> Any:
    queries = (_POSTGRESQL_COLUMNS, _POSTGRESQL_INDEXES, _POSTGRESQL_CONSTRAINTS)
    return [
        [tuple(row) for row in connection.exec_driver_sql(query.format(name=name))]
        for query in queries
    ]
