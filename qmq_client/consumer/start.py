"""Where a new group begins, as an application says it, and as it goes over the wire."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from qmq_client.errors import ConfigurationError
from qmq_client.wire import start as wire
from qmq_client.wire.errors import InvalidMessageError
from qmq_client.wire.shown import shorten

#: A word, a time, or a sequence.
Start = str | datetime | int

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_REMEDY: Final = 'Give "earliest", "latest", a datetime with a zone, or a sequence from 0.'


def start_text(start: Start) -> str:
    """The text of `wire/start.py`; raises `ConfigurationError`."""
    try:
        return str(wire.parse_start(_text(start)))
    except InvalidMessageError as error:
        raise _wrong(start) from error


def _text(start: object) -> str:
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise _wrong(start)
        return f"time:{(start - _EPOCH) // timedelta(milliseconds=1)}"
    if isinstance(start, bool) or not isinstance(start, int | str):
        raise _wrong(start)
    return f"sequence:{start}" if isinstance(start, int) else start


def _wrong(start: object) -> ConfigurationError:
    return ConfigurationError(setting="start", value=shorten(start), remedy=_REMEDY)
