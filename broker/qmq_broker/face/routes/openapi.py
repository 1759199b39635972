"""The OpenAPI document: which routes there are, what they take, what they answer.

Made from the table in `operations.py` and the structs that decode and encode the bodies, so that a
field cannot be in one and not in the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, Final

import msgspec

from qmq_broker.face.callers.access import Role
from qmq_broker.face.routes.operations import ALWAYS, GUARDED, OPERATIONS, Operation, structs
from qmq_broker.face.routes.rules import RULES, About
from qmq_client.wire.requests import FRAME_CONTENT_TYPE, JSON_CONTENT_TYPE, ErrorAnswer

_VERSION: Final = "3.1.0"
_REFERENCE: Final = "#/components/schemas/{name}"
_IN_PATH: Final = re.compile(r"{(\w+)}")
#: Checked by the hot routes themselves.
_HOT: Final = {
    "POST /v1/send": (Role.PRODUCER,),
    "POST /v1/pull": (Role.CONSUMER,),
    "POST /v1/settle": (Role.CONSUMER,),
}
#: Statuses after which one may come back later.
_RETRIED: Final = frozenset({429, 503, 507})


def document(route_names: Iterable[str]) -> bytes:
    """The document of these routes, as JSON."""
    types = [*structs(), ErrorAnswer]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    known = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for name in route_names:
        method, _, path = name.partition(" ")
        operation = OPERATIONS.get(name)
        if operation is not None:
            shown = _operation(name, operation, known)
            paths.setdefault(path, {})[method.lower()] = shown
    return msgspec.json.encode(
        {
            "openapi": _VERSION,
            "info": {"title": "QMQ broker", "version": "1"},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _operation(name: str, operation: Operation, known: dict[Any, Any]) -> dict[str, Any]:
    statuses = {*ALWAYS, *operation.statuses, *(() if operation.is_open else GUARDED)}
    shown: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", name.lower()).strip("_"),
        "summary": operation.about,
        "parameters": _parameters(name, operation),
        "responses": {
            "200": {"description": "Done.", "content": _answer(operation, known)},
            **{str(status): _refusal(status, known) for status in sorted(statuses)},
        },
        "security": [] if operation.is_open else [{"token": []}],
    }
    if not operation.is_open:
        shown["x-roles"] = _roles(name)
    if operation.body is not None:
        content: dict[str, Any] = {JSON_CONTENT_TYPE: {"schema": known[operation.body]}}
        if operation.has_frames:
            content[FRAME_CONTENT_TYPE] = {"schema": {"type": "string", "format": "binary"}}
        shown["requestBody"] = {"required": True, "content": content}
    return shown


def _parameters(name: str, operation: Operation) -> list[dict[str, Any]]:
    in_path = [
        {"name": one, "in": "path", "required": True, "schema": {"type": "string"}}
        for one in _IN_PATH.findall(name)
    ]
    return in_path + [
        {
            "name": one.name,
            "in": "query",
            "required": one.is_required,
            "description": one.about,
            "schema": {"type": "integer", "minimum": 0} if one.is_number else {"type": "string"},
        }
        for one in operation.query
    ]


def _answer(operation: Operation, known: dict[Any, Any]) -> dict[str, Any]:
    if operation.has_text:
        return {"text/plain": {"schema": {"type": "string"}}}
    if operation.has_bytes:
        return {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    if isinstance(operation.answer, type):
        schema = known[operation.answer]
    else:
        schema = {"type": "object", "required": list(operation.answer)}
    content: dict[str, Any] = {JSON_CONTENT_TYPE: {"schema": schema}}
    if operation.has_frames:
        content[FRAME_CONTENT_TYPE] = {"schema": {"type": "string", "format": "binary"}}
    return content


def _refusal(status: int, known: dict[Any, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "description": HTTPStatus(status).phrase,
        "content": {JSON_CONTENT_TYPE: {"schema": known[ErrorAnswer]}},
    }
    if status in _RETRIED:
        shown["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    return shown


def _roles(name: str) -> list[str]:
    """Who may ask."""
    rule = RULES.get(name)
    if rule is None:
        return [*_HOT.get(name, ()), Role.ADMIN]
    if rule.about is About.NOTHING:
        return list(Role)
    return [*rule.roles, Role.ADMIN]
