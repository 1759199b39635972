"""The query string of a request: each name once, and numbers within the bounds of the table of routes."""

from __future__ import annotations

from starlette.requests import Request

from qmq_broker.face.routes.route import route_of
from qmq_client.wire.errors import InvalidMessageError
from qmq_client.wire.shown import shorten


def check_once(request: Request) -> None:
    """Raise `InvalidMessageError` for a name that is given twice.

    Otherwise the check of what a caller may see and the answer could each use a different one.
    """
    given = [name for name, _ in request.query_params.multi_items()]
    if len(given) == len(request.query_params):
        return
    field = next(name for name in given if given.count(name) > 1)
    raise InvalidMessageError(
        field="query",
        limit="each name once",
        value=f"{shorten(field)} given {given.count(field)} times",
        remedy="Leave all but one of them out.",
    )


def number(request: Request, field: str, *, default: int | None = None) -> int:
    """A number from 0 on; required if it has no default. Raises `InvalidMessageError`."""
    text = request.query_params.get(field)
    if text is None and default is not None:
        return default
    text = text or ""
    parameter = next(one for one in route_of(request.scope).query if one.name == field)
    highest: int = parameter.schema["maximum"]
    # Isdecimal alone would accept the digits of every script; 19 digits reach the highest number
    if text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) <= highest:
        return int(text)
    raise InvalidMessageError(
        field=field,
        limit=f"0 to {highest}",
        value=shorten(text),
        remedy=f"Give {field} as a number.",
    )
