"""Reader of outbox tables: scans their rows and returns them as Arrow batches of the table `outbox`.

Bodies stay in the database: a scan reads only the first bytes of a record, which hold its checksum
and due time. It reads each range of ids in short transactions of at most `CHUNK_ROWS` rows, so no
writer waits for the pipeline.

A row changes until it is sent, and it gets its id before its transaction commits. So a scan reads
all rows from a mark on, and below the mark those that are live or parked, or were sent since the last
scan. The mark follows a row so old that every transaction of its time has ended: no new row can
appear below the mark, but one may appear right above it. If an open row disappears, it was sent and
deleted, or a person deleted it.

SQLite reuses ids when the highest rows are deleted. If the row right below a mark is still the same
one, no id was reused; if it is not, new rows may be anywhere below the mark.

SQLAlchemy builds and executes the statements. The rows come directly from the driver's cursor, 500 at
a time, because SQLAlchemy's row objects would double the cost. PostgreSQL sends numbers and bytes in
binary. PyMySQL, written in Python, is slow for every single value; so MySQL and MariaDB format each
row as one line of CSV, and Arrow parses the lines. `docs/decisions/0026-no-adbc.md` says why this
does not use ADBC.
"""

from __future__ import annotations

import binascii
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.csv
import sqlalchemy as sa
from sqlalchemy import event

from qmq_client.database.engine import open_engine, section_tables
from qmq_client.database.errors import database_errors
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.table import LIVE, PARKED, SENT
from qmq_client.settings.sections import DatabaseSection
from qmq_client.wire.message_id import MESSAGE_ID_BYTES
from qmq_client.wire.record import DUE_BYTES, RECORD_FIXED_BYTES, TIME_MAX_MS
from qmq_pipeline.places.outbox_options import RANGE_ROWS
from qmq_pipeline.tables.columns import (
    Numbers,
    hex_text,
    longs,
    repeated_text,
    times,
    values_of,
)
from qmq_pipeline.tables.schemas import OUTBOX

#: The first bytes of a record, up to its checksum and due time.
HEAD_BYTES: Final = RECORD_FIXED_BYTES + DUE_BYTES
#: The columns that a read returns, in this order.
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
#: Few enough rows to stay in the processor's caches until they are columns: twice as fast as thousands.
_PART_ROWS: Final = 500
#: An empty field without quotes is NULL; with quotes it is the empty text.
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

#: Reads the rows that match a condition, in order of their ids, up to a limit.
ReadRows = Callable[[sa.ColumnElement[bool], int], pa.RecordBatch]


def row_reader(connection: sa.Connection, outbox: sa.Table) -> ReadRows:
    """The fastest reader for the driver of this connection. Each read is its own transaction."""
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
    """SQL that formats one row as CSV: bytes in hex, texts in quotes."""
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
    """The driver's rows, `_PART_ROWS` at a time; the transaction ends after the last."""
    result = connection.execute(query)
    cursor = result.context.cursor
    try:
        while part := cursor.fetchmany(_PART_ROWS):
            yield part
    except result.dialect.loaded_dbapi.Error as error:
        # SQLAlchemy translates only errors of rows that it fetches itself.
        raise sa.exc.OperationalError(str(query), None, error) from error
    finally:
        result.close()
        connection.rollback()


#: The names of a row's states in the table `outbox`.
STATES: Final = {LIVE: "live", PARKED: "parked", SENT: "sent"}
OPEN: Final = (LIVE, PARKED)
#: Most rows of one short transaction, which become one batch.
CHUNK_ROWS: Final = 20_000
#: Most ranges of one read: if ids have wide gaps, the ranges get wider instead of more.
_RANGES_MAX: Final = 1_000
#: Databases that reuse ids: the next id is the highest existing one plus one.
_GIVES_NUMBERS_AGAIN: Final = frozenset({"sqlite"})
#: The first bytes of a record, as `qmq_client/wire/record.py` writes them.
_HEAD: Final = np.dtype([("crc", ">u4"), ("id", "V16"), ("flags", "u1")])
_DELAYED_FLAG: Final = 0b100
_DAY_MS: Final = 86_400_000


#: What identifies a row: its message id in hex, and its creation time, ms since 1970.
Witness = tuple[str, int]


@dataclass(frozen=True, slots=True)
class ScanMark:
    """How far a scan has read one outbox."""

    #: Below this id the next scan reads only rows that are open or were sent since …
    next_id: int = 0
    #: … as long as this row is right below it.
    witness: Witness | None = None
    #: This scan reads all rows below `end_id` and from `first_id` on …
    end_id: int = 0
    #: … which is the mark of the last scan, or 0 if ids were reused.
    first_id: int = 0
    #: Time of this scan by the database's clock, ms since 1970.
    scanned_at_ms: int = 0
    #: Time of the previous scan.
    since_ms: int = 0


def plan_scan(section: DatabaseSection, last: ScanMark, *, safety_ms: int) -> ScanMark:
    """Plan the next scan of an outbox. Reads single rows only."""
    with _outbox(section) as (engine, outbox, connection):
        mark, witness = last.next_id, last.witness
        if _is_renumbered(engine, outbox, connection, mark, witness):
            mark = 0
        now_ms, end_id = _now_and_next_id(engine, outbox, connection)
        next_id = _settled_id(connection, outbox, mark, end_id, now_ms - safety_ms)
        witness = _witness(engine, outbox, connection, next_id)
    return ScanMark(next_id, witness, max(end_id, mark), mark, now_ms, last.scanned_at_ms)


def require_outbox(section: DatabaseSection) -> None:
    """Raise the error of a scan if the database or its outbox does not exist; reads one row."""
    with _outbox(section) as (_, outbox, connection):
        connection.execute(sa.select(outbox.c.id).limit(1)).scalar()


def _is_renumbered(
    engine: sa.Engine,
    outbox: sa.Table,
    connection: sa.Connection,
    mark: int,
    witness: Witness | None,
) -> bool:
    """Whether ids below the mark may have been reused since `witness` was right below it."""
    if not mark or engine.dialect.name not in _GIVES_NUMBERS_AGAIN:
        return False
    return witness is None or witness != _witness(engine, outbox, connection, mark)


def _witness(
    engine: sa.Engine, outbox: sa.Table, connection: sa.Connection, mark: int
) -> Witness | None:
    """The row right below the mark; None if there is none, or if the database does not reuse ids."""
    if engine.dialect.name not in _GIVES_NUMBERS_AGAIN:
        return None
    columns = outbox.c
    row = sa.select(columns.message_id, columns.created_at_ms).where(columns.id == mark - 1)
    found = connection.execute(row).one_or_none()
    return None if found is None else (bytes(found[0]).hex(), int(found[1]))


def _now_and_next_id(
    engine: sa.Engine, outbox: sa.Table, connection: sa.Connection
) -> tuple[int, int]:
    now = sa.literal_column(dialect_of(engine).now_ms, sa.BigInteger())
    now_ms = int(connection.execute(sa.select(now)).scalar_one())
    return now_ms, int(connection.execute(sa.select(sa.func.max(outbox.c.id))).scalar() or 0) + 1


def _settled_id(
    connection: sa.Connection, outbox: sa.Table, first_id: int, next_id: int, old_ms: int
) -> int:
    """The lowest id at which an open transaction may still insert a row.

    It follows the last row before the first one created after `old_ms`; `first_id` if there is none.
    """
    ids = outbox.c.id
    is_here = (ids >= first_id) & (ids < next_id)
    young = sa.select(ids).where(is_here, outbox.c.created_at_ms > old_ms).order_by(ids).limit(1)
    first_young = connection.execute(young).scalar()
    # One bound on each side, and the last row by the index: for a `max` with two upper bounds SQLite
    # reads all rows.
    is_old = (ids >= first_id) & (ids < (next_id if first_young is None else first_young))
    last = sa.select(ids).where(is_old).order_by(ids.desc()).limit(1)
    last_old = connection.execute(last).scalar()
    return first_id if last_old is None else int(last_old) + 1


def id_ranges(first_id: int, next_id: int, rows: int = RANGE_ROWS) -> list[tuple[int, int]]:
    """Cut a range of ids into equal ranges of at least `rows` ids, not all of which have a row."""
    width = max(rows, -(-(next_id - first_id) // _RANGES_MAX))
    return [(first, min(first + width, next_id)) for first in range(first_id, next_id, width)]


def first_and_next_id(section: DatabaseSection) -> tuple[int, int, int]:
    """The first and next id of the rows, and the time by the database's clock."""
    with _outbox(section) as (engine, outbox, connection):
        now = sa.literal_column(dialect_of(engine).now_ms, sa.BigInteger())
        ids = outbox.c.id
        # One subquery each: for `min` and `max` in one SELECT SQLite reads all rows.
        lower = sa.select(sa.func.min(ids)).scalar_subquery()
        upper = sa.select(sa.func.max(ids)).scalar_subquery()
        lowest, highest, now_ms = connection.execute(sa.select(lower, upper, now)).one()
    return (int(lowest), int(highest) + 1, int(now_ms)) if highest is not None else (0, 0, now_ms)


def batches(
    section: DatabaseSection,
    *,
    first_id: int,
    next_id: int,
    scanned_at_ms: int,
    changed_since_ms: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """Rows with an id in the range, in batches of up to `CHUNK_ROWS`.

    With `changed_since_ms`, only rows that are open, or were sent since then and are kept.
    """
    with _outbox(section) as (_, outbox, connection):
        read = row_reader(connection, outbox)
        is_wanted: sa.ColumnElement[bool] = sa.true()
        if changed_since_ms is not None:
            kept_until_ms = changed_since_ms + round(section.keep_sent_s * 1000)
            is_sent_since = (outbox.c.state == SENT) & (outbox.c.due_at_ms >= kept_until_ms)
            is_wanted = outbox.c.state.in_(OPEN) | is_sent_since
        while first_id < next_id:
            in_range = (outbox.c.id >= first_id) & (outbox.c.id < next_id)
            rows = read(in_range & is_wanted, CHUNK_ROWS)
            if not rows.num_rows:
                return
            yield _batch(section, rows, scanned_at_ms)
            first_id = rows["id"][-1].as_py() + 1


@contextmanager
def _outbox(section: DatabaseSection) -> Iterator[tuple[sa.Engine, sa.Table, sa.Connection]]:
    engine = open_engine(section, os.environ)
    try:
        with database_errors(section.name), engine.connect() as connection:
            yield engine, section_tables(section).outbox, connection
    finally:
        engine.dispose()


def _batch(section: DatabaseSection, rows: pa.RecordBatch, scanned_at_ms: int) -> pa.RecordBatch:
    count = rows.num_rows
    _, ids = values_of(rows["message_id"])
    id_rows = np.frombuffer(ids, np.uint8).reshape(count, MESSAGE_ID_BYTES)
    halves = id_rows.copy().view(">u8")
    codes, due_ms = rows["state"].to_numpy(), rows["due_at_ms"].to_numpy()
    keep_ms = round(section.keep_sent_s * 1000)
    crcs, deliver_at = head_columns(rows["head"])
    values: Mapping[str, pa.Array] = {
        "database": pa.repeat(pa.scalar(section.name), count),
        "row_id": rows["id"],
        "message_id": hex_text(id_rows),
        "producer": longs(halves[:, 0]),
        "counter": longs(halves[:, 1]),
        "subject": rows["subject"],
        "state": _state_names(codes),
        "attempts": rows["attempts"],
        "created_at": times(rows["created_at_ms"].to_numpy()),
        "due_at": times(due_ms),
        "sent_at": times(due_ms - keep_ms, (codes != SENT) | (keep_ms == 0)),
        "deliver_at": deliver_at,
        "record_crc": crcs,
        "record_bytes": rows["record_bytes"],
        "last_error": rows["last_error"],
        "scanned_at": times(np.full(count, scanned_at_ms, np.int64)),
        "day": pa.repeat(pa.scalar(scanned_at_ms // _DAY_MS, pa.int32()), count).view(pa.date32()),
    }
    return pa.RecordBatch.from_arrays(
        [values[name] for name in OUTBOX.names], schema=OUTBOX.arrow()
    )


def _state_names(codes: Numbers) -> pa.Array:
    known, places = np.unique(codes, return_inverse=True)
    return repeated_text([STATES.get(code, str(code)) for code in known.tolist()], places)


def head_columns(heads: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Checksum and due time of each record, from its first bytes; null if they are no record."""
    ends, values = values_of(heads)
    first, lengths = ends[:-1], np.diff(ends)
    # Padding after the last one, because a head may be shorter than a window.
    data = np.concatenate((np.frombuffer(values, np.uint8), np.zeros(HEAD_BYTES, np.uint8)))
    windows = np.lib.stride_tricks.sliding_window_view(data, HEAD_BYTES)[first]
    fixed = np.ascontiguousarray(windows[:, : _HEAD.itemsize]).view(_HEAD)[:, 0]
    is_short = lengths < RECORD_FIXED_BYTES
    is_delayed = ((fixed["flags"] & _DELAYED_FLAG) != 0) & (lengths == HEAD_BYTES) & ~is_short
    due_ms = np.ascontiguousarray(windows[:, RECORD_FIXED_BYTES:]).view(">u8")[:, 0]
    due_ms = np.where(is_delayed, np.minimum(due_ms, TIME_MAX_MS), 0)
    return longs(fixed["crc"], is_short), times(due_ms, ~is_delayed)
