"""What a transaction knows about the producer that sends in it, and the statements that store its rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.errors import EncodingError, OutboxMissingError, TooLargeError
from qmq_client.outbox.database.dialect import OutboxDialect
from qmq_client.outbox.database.link import Link
from qmq_client.outbox.row import OutboxRow
from qmq_client.outbox.transaction.handoff import HandOver
from qmq_client.wire.message_id import format_message_id
from qmq_client.wire.shown import shorten

_NAMED_IDS_MAX: Final = 5
_OVERTAKEN: Final = (
    "another transaction has written since this one first read, and SQLite lets nobody wait for that: "
    "take the turn first, by @transactional or a write as the first statement"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outlet:
    """What a transaction needs to know about a producer; one for each producer."""

    outbox: sa.Table
    order_lock: sa.Table
    dialect: OutboxDialect
    #: Bytes of records that may wait for the commit.
    buffer_bytes: int
    #: The longest record that the server takes; None if it sets no limit.
    record_bytes_max: int | None
    #: Write at once, and check again before every commit, whatever it costs.
    is_strict: bool
    #: The token that new rows carry.
    token: bytes
    #: `InsertTexts`: the INSERT of so many rows, five parameters each.
    insert_texts: Mapping[tuple[int, bool], str]
    #: The producer's clock.
    monotonic_s: Callable[[], float]
    #: Takes committed rows; never blocks, never raises.
    hand_over: Callable[[HandOver], None]


def insert_rows(
    connection: sa.Connection, link: Link, outlet: Outlet, rows: list[OutboxRow]
) -> bool:
    """One INSERT; whether the database confirms that all rows are there.

    Raises the database's own error with a note that names the messages. Rows with a dedupe id are
    not checked: one that existed before is not missing.

    The driver gets it as SQLAlchemy would pass it, without steps that serve nobody here: each
    transaction with messages pays for this, and SQLAlchemy's own path takes three times as long for
    a text without a result. SQLAlchemy's path is used if somebody listens, by an event or a log.
    """
    values: list[object] = []
    skips_known = False
    for row in rows:
        values += (row.message_id, row.subject, row.ordering_key, row.record, outlet.token)
        if row.is_repeatable:
            skips_known = True
    text = outlet.insert_texts[len(rows), skips_known]
    parameters = tuple(values)
    inner: Any = connection
    engine = inner.engine
    is_listened_to = inner._echo or inner._has_events or engine._has_events
    try:
        if is_listened_to or engine.dialect.dispatch.do_execute:
            inserted: int = connection.exec_driver_sql(text, parameters).rowcount
            return skips_known or not 0 <= inserted < len(rows)
        cursor = connection.connection.cursor()
        try:
            if not link.was_open:
                outlet.dialect.before_statement(connection, link, cursor, text)
            cursor.execute(text, parameters)
            if not link.was_open:
                outlet.dialect.note_answer(link, text)
        except BaseException as error:
            # As SQLAlchemy treats every error of a driver: its own type, handlers, lost connections.
            connection._handle_dbapi_exception(error, text, parameters, cursor, None)
    except sa.exc.DBAPIError as error:
        _explain(error, outlet, rows, outlet.insert_texts[1, skips_known])
        raise
    inserted = cursor.rowcount
    cursor.close()
    return skips_known or not 0 <= inserted < len(rows)


def _explain(
    error: sa.exc.DBAPIError, outlet: Outlet, rows: list[OutboxRow], text_of_one: str
) -> None:
    """Let the error of an INSERT name the messages; raises another one if the table is missing."""
    note = f"while writing {ids_text([row.message_id for row in rows])} to {outlet.outbox.fullname}"
    if outlet.dialect.is_table_missing(error):
        raise OutboxMissingError(
            f"{error.orig}, {note}. It was there when the producer was made. Where this session "
            "looks elsewhere (another search_path, or USE), name its schema: "
            "Producer(…, tables=make_tables(metadata, schema=…)). Where it was dropped, run "
            "`qmq db migrate`."
        ) from error
    # The error shows only one row of the statement, and no values: these are bodies of messages.
    error.statement = text_of_one
    error.hide_parameters = True
    error.add_note(note)
    if outlet.dialect.is_overtaken(error):
        error.add_note(_OVERTAKEN)


def lock_keys(connection: sa.Connection, unwritten: list[tuple[Outlet, OutboxRow]]) -> None:
    """Lock the ordering keys of these rows until the commit; see `OutboxDialect.lock_keys`."""
    keyed = [each for each in unwritten if each[1].ordering_key is not None]
    if not keyed:
        return
    for outlet in dict.fromkeys([outlet for outlet, _ in keyed]):
        rows = [row for other, row in keyed if other is outlet]
        outlet.dialect.lock_keys(connection, outlet.order_lock, rows)


def check_row(outlet: Outlet, link: Link, row: OutboxRow) -> None:
    """Raise `InvalidMessageError` for a row that this server or this connection cannot take."""
    allowed = outlet.record_bytes_max
    if allowed is not None and len(row.record) > allowed:
        raise TooLargeError(
            field="message",
            limit=f"{allowed} bytes in one statement of this database",
            value=f"{len(row.record)} bytes",
            remedy="Raise max_allowed_packet on the server, or keep the content elsewhere and "
            "send a reference to it.",
        )
    key = row.ordering_key
    if key is not None and not key.isascii() and not outlet.dialect.can_encode(link, key):
        raise EncodingError(
            field="key",
            limit="characters of the connection's own character set, where order is kept by key",
            value=shorten(key),
            remedy="Connect with charset=utf8mb4 (MySQL, MariaDB) or client_encoding=utf8 "
            "(PostgreSQL), or choose another key.",
        )


def ids_text(message_ids: Collection[bytes]) -> str:
    """The messages as errors name them."""
    shown = ", ".join(format_message_id(id_) for id_ in list(message_ids)[:_NAMED_IDS_MAX])
    more = len(message_ids) - _NAMED_IDS_MAX
    return f"message {shown}{f' and {more} more' if more > 0 else ''}"
