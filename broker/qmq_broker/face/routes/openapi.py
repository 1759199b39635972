"""The OpenAPI document, made from the table of routes and the types that decode and encode the bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from qmq_broker.face.authentication.access import Role
from qmq_broker.face.routes.route import About, Route
from qmq_client.wire.requests import (
    FRAME_CONTENT_TYPE,
    JSON_CONTENT_TYPE,
    MESSAGE_ID_FORM,
    ErrorAnswer,
)

_VERSION: Final = "3.1.0"
_REFERENCE: Final = "#/components/schemas/{name}"
_IN_PATH: Final = re.compile(r"{(\w+)}")
#: Refusals by every route: bad request, too slow, bad query, long head, faults of the broker.
_ALWAYS: Final = (400, 408, 422, 431, 500, 503)
#: Refusals by routes that need a token.
_GUARDED: Final = (401, 403)
#: Statuses after which a client may try again later.
_RETRIED: Final = frozenset({429, 503, 507})
_BYTES: Final = {"schema": {"type": "string", "format": "binary"}}


class OpenApi:
    """Serves the document of these routes."""

    def __init__(self, routes: Sequence[Route[Any]], *, has_tokens: bool) -> None:
        self._routes = routes
        self._has_tokens = has_tokens
        self._content: bytes | None = None

    async def show(self, _: Request) -> Response:
        """The OpenAPI document, encoded once."""
        if self._content is None:
            self._content = msgspec.json.encode(document(self._routes, has_tokens=self._has_tokens))
        return Response(self._content, media_type=JSON_CONTENT_TYPE)


def document(routes: Sequence[Route[Any]], *, has_tokens: bool) -> dict[str, Any]:
    """The document of these routes; it asks for tokens only if the broker has some."""
    kinds = [kind for route in routes for kind in _kinds(route)]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    # By `repr`, because list[int], for example, is a new object wherever it is written
    known = {repr(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        shown = _operation(route, known)
        if has_tokens:
            shown["security"] = [] if route.is_open else [{"token": []}]
        paths.setdefault(route.path, {})[route.method.lower()] = shown
    schemes = {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}}
    return {
        "openapi": _VERSION,
        "info": {"title": "QMQ broker", "version": "1"},
        "paths": paths,
        "components": {"schemas": components, **(schemes if has_tokens else {})},
    }


def _kinds(route: Route[Any]) -> list[Any]:
    answers = [route.answer] if isinstance(route.answer, type) else route.answer.values()
    return [kind for kind in (ErrorAnswer, route.body, *answers) if kind is not None]


def _operation(route: Route[Any], known: dict[str, Any]) -> dict[str, Any]:
    statuses = {*_ALWAYS, *route.statuses, *(() if route.is_open else _GUARDED)}
    shown: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", route.name.lower()).strip("_"),
        "summary": route.summary,
        "parameters": _parameters(route),
        "responses": {
            "200": {"description": "Done.", "content": _answer(route, known)},
            **{str(status): _refusal(status, known) for status in sorted(statuses)},
        },
    }
    if not route.is_open:
        is_for_all = route.about is About.NOTHING
        shown["x-roles"] = list(Role) if is_for_all else [*route.roles, Role.ADMIN]
    if route.body is not None:
        schema = known[repr(route.body)]
        content: dict[str, Any] = {JSON_CONTENT_TYPE: {"schema": schema, "example": route.example}}
        if route.has_frames:
            content[FRAME_CONTENT_TYPE] = _BYTES
        shown["requestBody"] = {"required": True, "content": content}
    return shown


def _parameters(route: Route[Any]) -> list[dict[str, Any]]:
    in_path = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", **MESSAGE_ID_FORM},
        }
        for name in _IN_PATH.findall(route.path)
    ]
    return in_path + [
        {
            "name": one.name,
            "in": "query",
            "required": one.is_required,
            "description": one.summary,
            "schema": one.schema,
            "example": int(one.example) if one.is_number else one.example,
        }
        for one in route.query
    ]


def _answer(route: Route[Any], known: dict[str, Any]) -> dict[str, Any]:
    if route.media_type != JSON_CONTENT_TYPE:
        is_text = route.media_type == "text/plain"
        return {route.media_type: {"schema": {"type": "string"}} if is_text else _BYTES}
    schema: dict[str, Any]
    if isinstance(route.answer, type):
        schema = known[repr(route.answer)]
    else:
        fields = {name: known[repr(kind)] for name, kind in route.answer.items()}
        schema = {"type": "object", "properties": fields, "required": list(fields)}
    frames = {FRAME_CONTENT_TYPE: _BYTES} if route.has_frames else {}
    return {JSON_CONTENT_TYPE: {"schema": schema}, **frames}


def _refusal(status: int, known: dict[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "description": HTTPStatus(status).phrase,
        "content": {JSON_CONTENT_TYPE: {"schema": known[repr(ErrorAnswer)]}},
    }
    if status in _RETRIED:
        shown["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    return shown
