"""Errors as HTTP answers: the status of each error, and the body that explains it.

The only place that maps the broker's errors to HTTP. An unforeseen error becomes a 500 without
details; they are logged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from qmq_broker.errors import StoreError
from qmq_client.wire.errors import QmqError
from qmq_client.wire.requests import ErrorAnswer

#: After a full disk, or while a broker restarts, clients should wait before they try again.
_STORE_RETRY_AFTER_S: Final = 5.0

INTERNAL: Final = ErrorAnswer(
    code="internal",
    message="the broker failed on this request; its log says why",
    remedy="Try again. If it fails again, report it with the broker's log.",
)


@dataclass(kw_only=True, eq=False, repr=False)
class RequestRefusedError(QmqError):
    """An HTTP request was refused before its content was read."""

    status: int
    code: str = "request"

    text = "{message}"


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
    """A refusal by the HTTP layer itself."""
    return RequestRefusedError(
        message,
        status=status,
        code=code,
        field=field,
        limit=limit,
        value=value,
        remedy=remedy,
        retry_after_s=retry_after_s,
    )


def busy(field: str, value: int, limit: int) -> RequestRefusedError:
    """The refusal of a request that would exceed a limit shared by all callers."""
    return refuse(
        503,
        "busy",
        f"{field}: {value}; allowed: {limit}",
        field=field,
        limit=str(limit),
        value=str(value),
        remedy="Send the request again later.",
        retry_after_s=1.0,
    )


def error_answer(error: QmqError) -> ErrorAnswer:
    """The answer for a known error."""
    if error.status == 500 and not isinstance(error, StoreError | RequestRefusedError):
        return INTERNAL
    return ErrorAnswer(
        code=error.code,
        message=str(error),
        field=error.field,
        limit=error.limit,
        value=error.value,
        remedy=error.remedy,
        message_id=error.message_id,
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
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return tuple(headers)


def retry_after(error: QmqError) -> bytes | None:
    """The value of `Retry-After` in whole seconds; None if a later attempt would not help."""
    seconds = error.retry_after_s
    if not seconds and error.status in (503, 507):
        seconds = _STORE_RETRY_AFTER_S
    return str(math.ceil(seconds)).encode() if seconds else None
