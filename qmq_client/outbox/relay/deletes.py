"""Deleting rows by their keys, without waiting for rows of others.

MySQL and MariaDB read a small table whole for a DELETE with a list, and then wait for every row in it
that a transaction of the application has inserted and not committed (an UPDATE passes over those). An
outbox is small nearly always, so a publisher would stand still behind the longest transaction there
is. Joined to the list, in this order, each row is found by its key and no other is looked at.
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
    table = column.table
    if connection.dialect.name not in _MYSQL:
        equal = [table.c[name] == value for name, value in where.items()]
        less = [table.c[name] < sa.text(text) for name, text in below.items()]
        delete = sa.delete(table).where(column.in_(values), *equal, *less)
        return connection.execute(delete).rowcount
    name = connection.dialect.identifier_preparer.format_table(table)
    first = f"CAST(%s AS BINARY({len(values[0])}))" if isinstance(values[0], bytes) else "%s"
    chosen = " UNION ALL ".join(
        [f"SELECT {first} AS chosen_key", *["SELECT %s"] * (len(values) - 1)]
    )
    further = "".join(f" AND victim.{other} = %s" for other in where)
    further += "".join(f" AND victim.{other} < {text}" for other, text in below.items())
    sql = (
        f"DELETE victim FROM ({chosen}) AS chosen STRAIGHT_JOIN {name} AS victim "
        f"ON victim.{column.name} = chosen.chosen_key{further}"
    )
    return connection.exec_driver_sql(sql, (*values, *where.values())).rowcount
