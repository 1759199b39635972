"""The one statement that a transaction pays for its messages: its text, and how it is executed.

A row is born owned: it carries the token of its process and falls due after the takeover time, so
the direct path and the watchdog share one protocol. The text is made once for each number of rows
and passed to the driver as it is: building it through the expression language each time would cost
more than everything else in a send.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.errors import (
    ConfigurationError,
    EncodingError,
    OutboxMissingError,
    TooLargeError,
)
from qmq_client.outbox.database.link import Link
from qmq_client.outbox.row import OutboxRow
from qmq_client.outbox.table import LIVE
from qmq_client.outbox.transaction.outlet import Outlet
from qmq_client.wire.message_id import format_message_id
from qmq_client.wire.shown import shorten

_PLACEHOLDERS = {"qmark": "?", "format": "%s", "pyformat": "%s"}
#: Ending of a statement that skips ids which exist already. MySQL's INSERT IGNORE would skip every
#: other fault as well, and it objects if the column that it numbers is set to itself.
_SKIP_KNOWN = {
    "mysql": " ON DUPLICATE KEY UPDATE state = state",
    "mariadb": " ON DUPLICATE KEY UPDATE state = state",
}
_SKIP_KNOWN_ELSEWHERE = " ON CONFLICT (message_id) DO NOTHING"
_COLUMNS = (
    "message_id",
    "subject",
    "ordering_key",
    "record",
    "token",
    "state",
    "attempts",
    "due_at_ms",
    "created_at_ms",
)
_NAMED_IDS_MAX: Final = 5
_OVERTAKEN: Final = (
    "another transaction has written since this one first read, and SQLite lets nobody wait for that: "
    "take the turn first, by @transactional or a write as the first statement"
)


class InsertTexts(dict[tuple[int, bool], str]):
    """INSERT statements by their number of rows, with the parameters message_id, subject,
    ordering_key, record and token for each row; and whether an id that is there is no error.

    Each is made when it is first asked for.
    """

    def __init__(
        self, engine: sa.Engine, outbox: sa.Table, *, now_ms: str, takeover_ms: int
    ) -> None:
        preparer = engine.dialect.identifier_preparer
        placeholder = _PLACEHOLDERS.get(engine.dialect.paramstyle)
        if placeholder is None:
            raise ConfigurationError(
                setting="engine",
                value=f"a driver with parameters in the style {engine.dialect.paramstyle!r}",
                remedy=f"The outbox knows {', '.join(_PLACEHOLDERS)}.",
            )
        columns = ", ".join(preparer.quote(name) for name in _COLUMNS)
        self._head = f"INSERT INTO {preparer.format_table(outbox)} ({columns}) VALUES "
        given = ", ".join([placeholder] * 5)
        self._row = f"({given}, {LIVE}, 0, {now_ms} + {takeover_ms}, {now_ms})"
        self._skip_known = _SKIP_KNOWN.get(engine.dialect.name, _SKIP_KNOWN_ELSEWHERE)

    def __missing__(self, wanted: tuple[int, bool]) -> str:
        row_count, skips_known = wanted
        text = self._head + ", ".join([self._row] * row_count)
        if skips_known:
            text += self._skip_known
        self[wanted] = text
        return text


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
