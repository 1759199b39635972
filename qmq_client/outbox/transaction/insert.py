"""The text of the one statement that a transaction pays for its messages.

A row is born owned: it carries the token of its process and falls due after the takeover time, so
the direct path and the watchdog share one protocol. The text is made once for each number of rows
and passed to the driver as it is: building it through the expression language each time would cost
more than everything else in a send.
"""

from __future__ import annotations

import sqlalchemy as sa

from qmq_client.errors import ConfigurationError
from qmq_client.outbox.table import LIVE

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
