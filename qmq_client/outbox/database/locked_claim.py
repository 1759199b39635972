"""A claim on a server, in two statements: rows are locked and read, then they get their token.

The records are read with the lock. An UPDATE that returns them would cost more: a server rewrites a
row before it returns it, and must find each row twice, once for its size and once to write it.

Between the two statements no other process can take the rows: they are locked, and others skip them.
Large records are read only once it is known that they fit; if the UPDATE cannot return them, a
third statement reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.outbox.database.claiming import (
    ClaimTerms,
    as_outbox_rows,
    row_id,
    wanted_rows,
)
from qmq_client.outbox.database.dialect import OutboxDialect
from qmq_client.outbox.database.placeholders import placeholders
from qmq_client.outbox.database.table_names import table_sql
from qmq_client.outbox.row import OutboxRow

#: Index of the record in a claimed row.
_RECORD: Final = 4


def claim_locked(
    connection: sa.Connection, outbox: sa.Table, terms: ClaimTerms, dialect: OutboxDialect
) -> list[OutboxRow]:
    """Take rows as `OutboxDialect.claim` does. Requires: READ COMMITTED."""
    table = table_sql(connection, outbox)
    wanted = wanted_rows(dialect.now_ms, terms.keys, placeholders(connection.dialect))
    # So many rows of at most this size surely fit; larger records are read once that is known.
    small_bytes = terms.bytes_max // terms.limit
    is_small = f"CASE WHEN octet_length(record) <= {small_bytes:d} THEN"
    found = connection.exec_driver_sql(
        "SELECT id, message_id, subject, ordering_key, "
        f"{is_small} record END, {is_small} attempts ELSE -octet_length(record) END "
        f"FROM {table} WHERE {wanted.text} LIMIT {terms.limit:d} FOR UPDATE SKIP LOCKED",
        wanted.parameters,
    ).all()
    fitting = _fitting(found, terms.bytes_max)
    if not fitting:
        return []
    taking = (
        f"UPDATE {table} SET token = {dialect.binary(terms.token)}, "
        f"due_at_ms = {dialect.now_ms} + {terms.lease_ms:d} "
        f"WHERE {_numbered([row_id(row) for row in fitting])}"
    )
    large = [row_id(row) for row in fitting if row[_RECORD] is None]
    if large and connection.dialect.update_returning:
        is_large = f"CASE WHEN octet_length(record) > {small_bytes:d} THEN"
        rest = connection.exec_driver_sql(
            f"{taking} RETURNING id, {is_large} record END, attempts"
        ).all()
        return as_outbox_rows(_completed(fitting, rest))
    connection.exec_driver_sql(taking)
    if large:
        rest = connection.exec_driver_sql(
            f"SELECT id, record, attempts FROM {table} WHERE {_numbered(large)}"
        ).all()
        fitting = _completed(fitting, rest)
    return as_outbox_rows(fitting)


def _numbered(numbers: Sequence[int]) -> str:
    """A condition for rows with these numbers; as text, since parameters would cost drivers more."""
    first, last = min(numbers), max(numbers)
    if last - first + 1 == len(numbers):  # one piece: found by one descent into the index
        return f"id BETWEEN {first:d} AND {last:d}"
    return f"id IN ({', '.join(map(str, numbers))})"


def _fitting(found: Sequence[Any], bytes_max: int) -> Sequence[Any]:
    """The first of the rows, as many as fit; all of them if none is large.

    A large one has no record yet, and its negated length in place of its attempts: that saves every
    other row a column, which some drivers decode in Python.
    """
    if all(row[_RECORD] is not None for row in found):
        return found
    lengths = (-row[-1] if row[_RECORD] is None else len(row[_RECORD]) for row in found)
    totals = accumulate(lengths, initial=0)
    return [row for row, before in zip(found, totals, strict=False) if before < bytes_max]


def _completed(rows: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
    """The rows; large ones get the record and the attempts from `rest`, by their number."""
    known = {number: (record, attempts) for number, record, attempts in rest}
    return [(*row[:_RECORD], *known[row_id(row)]) if row[_RECORD] is None else row for row in rows]
