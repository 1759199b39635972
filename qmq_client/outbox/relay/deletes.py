"""Deleting rows by their keys, without waiting for rows of others.

MySQL and MariaDB read a small table whole for a DELETE with a list, and then wait for every row in it
that a transaction of the application has inserted and not committed (an UPDATE passes over those). An
outbox is small nearly always, so a publisher would stand still behind the longest transaction there
is. Joined to the list, in this order, each row is found by its key and no other is looked at. Neither
a range of keys does that, which ends at the row behind it, nor a forced index, which may be read whole.

No list is given as so many parameters where that can be helped: it takes a driver longer to write them
than the server to find the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa

_MYSQL: Final = ("mysql", "mariadb")
_NONE: Final[Mapping[str, Any]] = {}


def delete_by(
    connection: sa.Connection,
    column: sa.Column[Any],
    values: Sequence[bytes] | Sequence[int],
    *,
    where: Mapping[str, object] = _NONE,
    below: Mapping[str, str] = _NONE,
) -> int:
    """Delete the rows whose `column`, which has an index, is one of these; how many.

    `where`: further columns and what they must be. `below`: columns and the SQL expression, of ours,
    that they must be less than.
    """
    if not values:
        return 0
    table = connection.dialect.identifier_preparer.format_table(column.table)
    name = connection.dialect.name
    mark = "?" if name == "sqlite" else "%s"
    further = "".join(f" AND victim.{other} = {mark}" for other in where)
    further += "".join(f" AND victim.{other} < {text}" for other, text in below.items())
    found, listed = _found_by(name, table, column, values)
    sql = f"DELETE {found}{further}"
    return connection.exec_driver_sql(sql, (*listed, *where.values())).rowcount


def _found_by(
    database: str, table: str, column: sa.Column[Any], values: Sequence[bytes] | Sequence[int]
) -> tuple[str, tuple[object, ...]]:
    """The statement from its second word to the condition on the column, and its parameters."""
    if database == "postgresql":
        return f"FROM {table} AS victim WHERE victim.{column.name} = ANY(%s)", (list(values),)
    if database not in _MYSQL:
        marks = ", ".join(["?"] * len(values))
        return f"FROM {table} AS victim WHERE victim.{column.name} IN ({marks})", tuple(values)
    if isinstance(values[0], bytes):
        texts = [f"X'{value.hex()}'" for value in values if isinstance(value, bytes)]
        texts[0] = f"CAST({texts[0]} AS BINARY({len(values[0])}))"
    else:
        texts = [str(value) for value in values]
    chosen = " UNION ALL SELECT ".join([f"{texts[0]} AS chosen_key", *texts[1:]])
    return (
        f"victim FROM (SELECT {chosen}) AS chosen STRAIGHT_JOIN {table} AS victim "
        f"ON victim.{column.name} = chosen.chosen_key",
        (),
    )
