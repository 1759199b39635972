"""Errors as answers: which HTTP status says what, and the body that explains it.

The one place where the broker's errors meet HTTP. An unforeseen error becomes a 500 without any
detail; the detail goes to the log.
"""

from __future__ import annotations

import math
from typing import Final

from qmq_broker.errors import (
    BusyError,
    ConflictError,
    ConsumerReplacedError,
    CorruptionError,
    DiskFullError,
    GroupConflictError,
    InvalidRecordError,
    NotFoundError,
    StoreError,
    UnavailableError,
)
from qmq_client.wire.errors import InvalidMessageError, ProtocolError, QmqError
from qmq_client.wire.requests import ErrorAnswer

#: The first match counts, so leaves come before their branches.
_STATUSES: Final[tuple[tuple[type[QmqError], int], ...]] = (
    (ConflictError, 409),
    (GroupConflictError, 409),
    (ConsumerReplacedError, 409),
    (InvalidRecordError, 422),
    (InvalidMessageError, 422),
    (ProtocolError, 400),
    (NotFoundError, 404),
    (BusyError, 429),
    (UnavailableError, 503),
    (DiskFullError, 507),
    (CorruptionError, 500),
    (StoreError, 503),
)
#: A full disk, or a broker that restarts, is not asked again at once.
_STORE_RETRY_AFTER_S: Final = 5.0

INTERNAL: Final = ErrorAnswer(
    code="internal",
    message="the broker failed on this request; its log says why",
    remedy="Try again; if it stays, report it with the broker's log.",
)


class RequestRefusedError(QmqError):
    """An HTTP request was refused before its content was looked at."""

    code = "request"

    def __init__(self, status: int, answer: ErrorAnswer, *, retry_after_s: float = 0.0) -> None:
        super().__init__(answer.message)
        self.status = status
        self.answer = answer
        self.retry_after_s = retry_after_s


def refuse(
    status: int,
    code: str,
    message: str,
    *,
    field: str = "",
    limit: str = "",
    value: str = "",
    remedy: str = "",
    retry_after_s: float = 0.0,
) -> RequestRefusedError:
    """A refusal by the face itself."""
    answer = ErrorAnswer(
        code=code, message=message, field=field, limit=limit, value=value, remedy=remedy
    )
    return RequestRefusedError(status, answer, retry_after_s=retry_after_s)


def error_status(error: QmqError) -> int:
    """The HTTP status of a foreseen error."""
    if isinstance(error, RequestRefusedError):
        return error.status
    if isinstance(error, BusyError) and error.is_for_everybody:
        return 503
    return status_of(type(error))


def status_of(kind: type[QmqError]) -> int:
    """The same for an error type of the lower floors."""
    return next((status for known, status in _STATUSES if issubclass(kind, known)), 500)


def error_answer(error: QmqError) -> ErrorAnswer:
    """The explanation of a foreseen error."""
    if isinstance(error, RequestRefusedError):
        return error.answer
    if error_status(error) == 500 and not isinstance(error, StoreError):
        return INTERNAL
    return ErrorAnswer(
        code=error.code,
        message=str(error),
        field=getattr(error, "field", ""),
        limit=getattr(error, "limit", ""),
        value=getattr(error, "value", ""),
        remedy=getattr(error, "remedy", ""),
        message_id=getattr(error, "message_id", ""),
    )


def error_code(error: QmqError) -> str:
    """The code given to the client: one of a fixed list."""
    return error_answer(error).code


def error_headers(error: QmqError) -> tuple[tuple[bytes, bytes], ...]:
    """The headers that belong to a refusal."""
    headers: list[tuple[bytes, bytes]] = []
    wait = retry_after(error)
    if wait is not None:
        headers.append((b"retry-after", wait))
    if error_status(error) == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return tuple(headers)


def retry_after(error: QmqError) -> bytes | None:
    """The value of `Retry-After` in whole seconds; None if coming back does not help."""
    seconds = getattr(error, "retry_after_s", 0.0)
    if not seconds and error_status(error) in (503, 507):
        seconds = _STORE_RETRY_AFTER_S
    return str(math.ceil(seconds)).encode() if seconds else None
