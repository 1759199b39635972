"""Bodies of the small JSON requests that operators send: bounded, strict, typed."""

from __future__ import annotations

from typing import Final, TypeVar

from starlette.requests import Request

from qmq_broker.face.http.requests import check_charset, read_head
from qmq_broker.face.strict_json import read_json
from qmq_client.wire.errors import TooLargeError

#: A filter of 64 tags has 8 kB.
BODY_BYTES_MAX: Final = 16 * 1024

T = TypeVar("T")


async def read_body(request: Request, kind: type[T]) -> T:
    """The body of a request as `kind`; raises `InvalidMessageError`, `ProtocolError` or `RequestRefusedError`."""
    check_charset(read_head(request.scope).content_type)
    body = await request.body()  # no more than one byte above the limit: `App` reads no further
    if len(body) > BODY_BYTES_MAX:
        raise TooLargeError(
            field="body",
            limit=f"{BODY_BYTES_MAX} bytes",
            value=f"more than {BODY_BYTES_MAX} bytes",
            remedy="Send less.",
        )
    return read_json(body, kind)
