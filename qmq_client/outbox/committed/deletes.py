"""Deletes rows by their keys without waiting for other transactions' rows.

For a DELETE with a list, MySQL and MariaDB read a small table as a whole, and then wait for every
row in it that a transaction of the application has inserted and not yet committed (an UPDATE skips
those). An outbox is nearly always small, so a publisher would wait for the longest open
transaction. If the table is joined to the list, in this order, each row is found by its key and no
other row is touched. A range of keys does not achieve that, because it also locks the next row; nor
does a forced index, which may be read as a whole. A hint also keeps MySQL from building a hash of
the list, because then it reads the whole table again.

Finding rows one by one is slower, though. A claim mostly consists of consecutive rows, and such a
piece is deleted as a range: on PostgreSQL, which does not see uncommitted rows, the whole piece; on
MariaDB up to the row before its last, because the row after the end of a range is locked too, and
this publisher owns the last row. With the order of the key no row before the first one is read.

Values are written into the statement, not passed as parameters: writing many of those takes a driver
longer than finding the rows takes the server, and each driver would need its own marks for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import sqlalchemy as sa

from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.database.table_names import table_sql

_MYSQL: Final = ("mysql", "mariadb")
#: Length of a run of rows that is worth a statement of its own.
PIECE_ROWS_MIN: Final = 50
#: MySQL's hint against joins without an index, hashed or not; for MariaDB a comment.
_BY_KEY: Final = "/*+ NO_BNL(victim) */"
_Value = TypeVar("_Value", bytes, int)

#: Ids in one statement: far below every database's limit of parameters, far above one per message.
IDS_PER_STATEMENT_MAX: Final = 500
_NONE: Final[Mapping[str, Any]] = {}


def delete_by(
    connection: sa.Connection,
    column: sa.Column[Any],
    values: Sequence[bytes] | Sequence[int],
    *,
    where: Mapping[str, object] = _NONE,
    below: Mapping[str, str] = _NONE,
) -> int:
    """Delete the rows whose `column`, which has an index, is one of these; returns how many.

    `where`: further columns and their values. `below`: columns, each with an SQL expression that it must be less than.
    """
    if not values:
        return 0
    table = table_sql(connection, column.table)
    further = "".join(
        f" AND victim.{other} = {_literal(connection, value)}" for other, value in where.items()
    )
    further += "".join(f" AND victim.{other} < {text}" for other, text in below.items())
    found = _found_by(connection, table, column, values)
    return connection.exec_driver_sql(f"DELETE {found}{further}").rowcount


def listed(connection: sa.Connection, values: Sequence[bytes] | Sequence[int]) -> str:
    """The values as a list for IN."""
    return ", ".join(_literal(connection, value) for value in values)


def has_pieces(connection: sa.Connection) -> bool:
    """Whether `delete_pieces` is faster on this database."""
    dialect = connection.dialect
    return dialect.name == "postgresql" or bool(getattr(dialect, "is_mariadb", False))


def delete_pieces(
    connection: sa.Connection, outbox: sa.Table, numbers: Sequence[int], token: bytes
) -> int:
    """Delete the rows with these numbers that `token` owns; returns how many.

    Requires: they were claimed with this token, which no other claim has, so that number and token
    identify a row like its message id; and the lease has not ended: if the last row of a piece is
    gone, the statement waits for the next one.
    """
    table = table_sql(connection, outbox)
    owner = _literal(connection, token)
    looks_behind = connection.dialect.name in _MYSQL
    scattered: list[int] = []
    deleted = 0
    for first, count in _pieces(sorted(numbers)):
        if count < PIECE_ROWS_MIN:
            scattered += range(first, first + count)
            continue
        last = first + count - 1
        found = f"id BETWEEN {first:d} AND {last:d} AND token = {owner}"
        if looks_behind:
            scattered.append(last)
            found = f"id BETWEEN {first:d} AND {last - 1:d} AND token = {owner} ORDER BY id LIMIT {count - 1:d}"
        deleted += connection.exec_driver_sql(f"DELETE FROM {table} WHERE {found}").rowcount
    return deleted + sum(
        delete_by(connection, outbox.c.id, some, where={"token": token})
        for some in chunks(scattered)
    )


def _pieces(ascending: Sequence[int]) -> list[tuple[int, int]]:
    """First number and length of each run without a gap."""
    pieces: list[tuple[int, int]] = []
    first = 0
    for index, number in enumerate(ascending):
        if index + 1 == len(ascending) or ascending[index + 1] != number + 1:
            pieces.append((ascending[first], index + 1 - first))
            first = index + 1
    return pieces


def chunks(values: Sequence[_Value]) -> Iterator[Sequence[_Value]]:
    """The values in portions, one for each statement."""
    for first in range(0, len(values), IDS_PER_STATEMENT_MAX):
        yield values[first : first + IDS_PER_STATEMENT_MAX]


def _found_by(
    connection: sa.Connection,
    table: str,
    column: sa.Column[Any],
    values: Sequence[bytes] | Sequence[int],
) -> str:
    """The statement from its second word to the condition on the column."""
    texts = [_literal(connection, value) for value in values]
    if connection.dialect.name not in _MYSQL:
        return f"FROM {table} AS victim WHERE victim.{column.name} IN ({', '.join(texts)})"
    if isinstance(values[0], bytes):
        texts[0] = f"CAST({texts[0]} AS BINARY({len(values[0])}))"
    chosen = " UNION ALL SELECT ".join([f"{texts[0]} AS chosen_key", *texts[1:]])
    return (
        f"{_BY_KEY} victim FROM (SELECT {chosen}) AS chosen STRAIGHT_JOIN {table} AS victim "
        f"ON victim.{column.name} = chosen.chosen_key"
    )


def _literal(connection: sa.Connection, value: object) -> str:
    """A literal for a value: bytes, a whole number, or a name without quotes."""
    if isinstance(value, bytes):
        return dialect_of(connection.engine).binary(value)
    if isinstance(value, int):
        return f"{value:d}"
    assert isinstance(value, str), "only these are written into statements"
    assert "'" not in value, "names have no quotes"
    assert "\\" not in value, "names have no backslashes"
    return f"'{value}'"
