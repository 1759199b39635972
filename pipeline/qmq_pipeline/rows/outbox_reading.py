"""Rows of an outbox table as raw Arrow columns, read from each database in the cheapest way.

The statements are SQLAlchemy's, on its connections. The results are taken from the driver's cursor,
some hundred rows at a time, because SQLAlchemy's row objects cost as much again as the driver's.
PostgreSQL sends numbers and bytes in binary. PyMySQL is written in Python and pays for every value,
so there the server makes one line of CSV of each row, and Arrow parses the lines.

Not for: the meaning of the columns; that is `rows/outbox.py`. Why not ADBC:
`docs/decisions/0026-no-adbc.md`.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.csv
import sqlalchemy as sa
from sqlalchemy import event

from qmq_client.wire.record import DUE_BYTES, RECORD_FIXED_BYTES
from qmq_pipeline.tables.columns import values_of

#: Bytes to read of a record: its checksum and due time are among them.
HEAD_BYTES: Final = RECORD_FIXED_BYTES + DUE_BYTES
#: The columns to read, in this order.
RAW: Final = pa.schema(
    [
        ("id", pa.int64()),
        ("message_id", pa.binary()),
        ("subject", pa.string()),
        ("state", pa.int64()),
        ("attempts", pa.int32()),
        ("created_at_ms", pa.int64()),
        ("due_at_ms", pa.int64()),
        ("head", pa.binary()),
        ("record_bytes", pa.int32()),
        ("last_error", pa.string()),
    ]
)
#: So many rows stay in the processor's caches until they are columns: twice as fast as thousands.
_PART_ROWS: Final = 500
#: Without quotes nothing is NULL; with quotes, "" is the empty text.
_CSV: Final = {
    "read_options": pyarrow.csv.ReadOptions(
        use_threads=False, column_names=RAW.names, block_size=1 << 30
    ),
    "parse_options": pyarrow.csv.ParseOptions(newlines_in_values=True),
    "convert_options": pyarrow.csv.ConvertOptions(
        column_types={
            one.name: pa.string() if pa.types.is_binary(one.type) else one.type for one in RAW
        },
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    ),
}

#: Reads at most so many rows that fulfil a condition, in order of their ids.
ReadRows = Callable[[sa.ColumnElement[bool], int], pa.RecordBatch]


def row_reader(connection: sa.Connection, outbox: sa.Table) -> ReadRows:
    """Choose the way for this connection's database. Each read is a transaction of its own."""
    if connection.dialect.driver == "psycopg":
        event.listen(connection, "before_cursor_execute", _ask_for_binary)
    plain = _by_values(connection, outbox)
    if connection.dialect.driver == "pymysql":
        return _by_lines(connection, outbox, plain)
    return plain


def _ask_for_binary(_: sa.Connection, cursor: Any, *__: Any) -> None:
    from psycopg.pq import Format

    cursor.format = Format.BINARY


def _by_values(connection: sa.Connection, outbox: sa.Table) -> ReadRows:
    query = sa.select(*_columns(outbox)).order_by(outbox.c.id)

    def read(condition: sa.ColumnElement[bool], limit: int) -> pa.RecordBatch:
        columns: list[list[Any]] = [[] for _ in RAW]
        for part in _parts(connection, query.where(condition).limit(limit)):
            for column, values in zip(columns, zip(*part, strict=True), strict=True):
                column.extend(values)
        arrays = [pa.array(column, one.type) for column, one in zip(columns, RAW, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=RAW)

    return read


def _by_lines(connection: sa.Connection, outbox: sa.Table, plain: ReadRows) -> ReadRows:
    query = sa.select(_line(outbox)).order_by(outbox.c.id)

    def read(condition: sa.ColumnElement[bool], limit: int) -> pa.RecordBatch:
        parts = _parts(connection, query.where(condition).limit(limit))
        lines = [line for part in parts for (line,) in part]
        if None in lines:  # longer than the server's `max_allowed_packet`
            return plain(condition, limit)
        return _parsed(lines)

    return read


def _columns(outbox: sa.Table) -> list[sa.ColumnElement[Any]]:
    columns = outbox.c
    return [
        columns.id,
        columns.message_id,
        columns.subject,
        columns.state,
        columns.attempts,
        columns.created_at_ms,
        columns.due_at_ms,
        sa.func.substr(columns.record, 1, HEAD_BYTES),
        sa.func.length(columns.record),
        columns.last_error,
    ]


def _line(outbox: sa.Table) -> sa.ColumnElement[Any]:
    """One row as CSV: bytes in hex, texts in quotes."""
    values: list[Any] = []
    for column, field in zip(_columns(outbox), RAW, strict=True):
        value: Any = column
        if pa.types.is_binary(field.type):
            value = sa.func.hex(column)
        elif pa.types.is_string(field.type):
            quoted = sa.func.concat('"', sa.func.replace(column, '"', '""'), '"')
            # Not IFNULL: a text that is too long for the server makes the whole line NULL.
            value = sa.case((column.is_(None), ""), else_=quoted)
        values += [",", value]
    return sa.func.concat(*values[1:])


def _parsed(lines: list[str]) -> pa.RecordBatch:
    if not lines:
        return pa.RecordBatch.from_pylist([], schema=RAW)
    table = pyarrow.csv.read_csv(pa.py_buffer("\n".join(lines).encode()), **_CSV)
    assert table.num_rows == len(lines), "a line of CSV is a row"
    arrays = [column.combine_chunks() for column in table.columns]
    return pa.RecordBatch.from_arrays(
        [
            _unhexed(array) if pa.types.is_binary(field.type) else array
            for array, field in zip(arrays, RAW, strict=True)
        ],
        schema=RAW,
    )


def _unhexed(digits: pa.Array) -> pa.Array:
    """The bytes of each text of hex digits; null becomes empty."""
    ends, data = values_of(digits)
    buffers = [None, pa.py_buffer(ends // 2), pa.py_buffer(binascii.unhexlify(data))]
    return pa.BinaryArray.from_buffers(pa.binary(), len(digits), buffers)


def _parts(connection: sa.Connection, query: sa.Select[Any]) -> Iterator[Sequence[Any]]:
    """The driver's rows, some hundred at a time; the transaction ends with the last."""
    result = connection.execute(query)
    cursor = result.context.cursor
    try:
        while part := cursor.fetchmany(_PART_ROWS):
            yield part
    except result.dialect.loaded_dbapi.Error as error:
        # SQLAlchemy translates errors of its own rows; these are read past it.
        raise sa.exc.OperationalError(str(query), None, error) from error
    finally:
        result.close()
        connection.rollback()
