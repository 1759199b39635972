"""The OpenAPI document is what the routes do: their paths, parameters, bodies and statuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.routing import Route

from qmq_broker.errors import DiskFullError
from qmq_broker.face.routes.admin import admin_app
from qmq_broker.face.routes.operations import OPERATIONS
from qmq_broker.face.routes.rules import HOT_ROUTES, route_name
from tests.broker.face.asgi import Client
from tests.broker.face.test_http_page import PAGE
from tests.broker.service.rig import GROUP, SUBJECT, Rig

MESSAGE_ID = "ab" * 16


@pytest.fixture
def client(rig: Rig) -> Client:
    client = Client(rig)
    message = {"subject": SUBJECT, "body": "x", "message_id": MESSAGE_ID}
    assert client.post("/v1/send", {"messages": [message]}).status == 200
    pull = {"subject": SUBJECT, "group": GROUP, "consumer": "one"}
    assert client.post("/v1/pull", pull).status == 200
    return client


@pytest.fixture
def document(client: Client) -> Any:
    return client.get("/openapi.json").json


def operations(document: Any) -> dict[str, Any]:
    return {
        f"{method.upper()} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_it_has_every_route_and_no_other(rig: Rig, document: Any) -> None:
    routes = [route for route in admin_app(rig.broker).routes if isinstance(route, Route)]
    served = {*HOT_ROUTES, *map(route_name, routes)}
    assert operations(document).keys() == served
    assert served == OPERATIONS.keys()


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def test_whatever_it_refers_to_is_in_it(document: Any) -> None:
    named = set(references(document))
    assert "#/components/schemas/ErrorAnswer" in named
    assert {name.removeprefix("#/components/schemas/") for name in named} <= document["components"][
        "schemas"
    ].keys()
    ids = [operation["operationId"] for operation in operations(document).values()]
    assert len(set(ids)) == len(ids)


def test_the_page_has_the_same_parameters() -> None:
    for name, operation in OPERATIONS.items():
        rows = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
        cells = " ".join(row.split("|")[3] for row in rows)
        assert [one.name for one in operation.query if f"`{one.name}`" not in cells] == [], name


QUESTIONS = [name for name, operation in OPERATIONS.items() if name.startswith("GET ")]
#: What is asked besides nothing at all and everything at once: a route may read less of these.
MORE = {
    "GET /v1/messages": [
        {"id": MESSAGE_ID, "count": "1"},
        {"subject": SUBJECT, "key": "k", "from": "0", "to": "9", "count": "1"},
        {"subject": SUBJECT, "first": "0", "count": "1"},
    ],
    "GET /v1/files/read": [{"path": "FORMAT", "first": "0", "count": "9"}],
}
VALUES = {"subject": SUBJECT, "group": GROUP, "directory": "state", "messages": "1"}


def ask(client: Client, name: str, values: dict[str, str]) -> tuple[int, Any]:
    path = name.removeprefix("GET ").replace("{message_id}", MESSAGE_ID)
    query = "&".join(f"{key}={value}" for key, value in values.items())
    reply = client.get(f"{path}?{query}")
    is_json = reply.headers[b"content-type"] == b"application/json"
    return reply.status, json.loads(reply.body) if is_json else None


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_has_the_parameters_that_its_route_reads(
    client: Client, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    read: set[str] = set()

    class Recording(QueryParams):
        def get(self, key: Any, default: Any = None) -> Any:
            read.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            read.add(str(key))
            return super().__contains__(key)

        def __getitem__(self, key: Any) -> str:
            read.add(key)
            return super().__getitem__(key)

    monkeypatch.setattr(
        Request, "query_params", property(lambda self: Recording(self.scope["query_string"]))
    )
    known = {one.name for one in OPERATIONS[name].query}
    everything = {one.name: VALUES.get(one.name, "1") for one in OPERATIONS[name].query}
    for values in ({}, everything, *MORE.get(name, [])):
        ask(client, name, values)
    # Whose subject it is, is asked of every route.
    assert read - {"subject"} == known - {"subject"}


def test_a_parameter_is_a_number_where_it_says_so_and_required_where_it_says_so(
    client: Client,
) -> None:
    for name, operation in OPERATIONS.items():
        required = {one.name for one in operation.query if one.is_required}
        for one in operation.query:
            good = next(
                (values for values in MORE.get(name, []) if one.name in values),
                {each: VALUES.get(each, "1") for each in required},
            )
            assert ask(client, name, good)[0] == 200, (name, good)
            if one.is_number:
                status, answer = ask(client, name, {**good, one.name: "x"})
                assert (status, answer["field"]) == (422, one.name)
            if one.is_required:
                without = {key: value for key, value in good.items() if key != one.name}
                assert ask(client, name, without)[0] == 422


BODIES = [
    b"", b"[]", b"{}", b'{"subject":"a"}', b'{"subject":"/","group":"g"}', b"\xff", b"x" * 20_000,
    b'{"subject":"no","group":"no"}', b'{"subject":"no","group":"no","to":"earliest"}',
]  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_status_that_is_met_is_in_the_document(client: Client, document: Any, name: str) -> None:
    method, _, path = name.partition(" ")
    path = path.replace("{message_id}", "cd" * 16)
    known = operations(document)[name]["responses"]
    if method == "POST":
        types = (b"application/json", b"text/plain")
        replies = [client.post(path, body, content_type=one) for body in BODIES for one in types]
    else:
        queries = ("", "subject=no&group=no", "subject=/", "id=1", "x=1&x=2")
        replies = [client.get(f"{path}?{query}") for query in queries]
    assert [reply for reply in replies if str(reply.status) not in known] == []


GROUP_NAMED = {"subject": SUBJECT, "group": GROUP}
#: Of what is noted in the action log: what asks for it.
NOTED: dict[str, dict[str, Any]] = {
    "POST /v1/pull": {**GROUP_NAMED, "consumer": "two"},
    "POST /v1/groups/pause": GROUP_NAMED,
    "POST /v1/groups/seek": {**GROUP_NAMED, "to": "earliest"},
    "POST /v1/groups/configure": {**GROUP_NAMED, "max_attempts": 3},
    "POST /v1/groups/remove": GROUP_NAMED,
}


@pytest.mark.parametrize("name", [*NOTED, "POST /v1/settle"])
def test_B6_a_disk_without_any_room_is_an_answer_in_the_document(
    rig: Rig, client: Client, document: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def full(_: object) -> None:
        raise DiskFullError("no space left on device")

    rig.send(b"y")
    given = rig.pull()
    settlements = [{"token": given.token, "acks": [[given.first, given.next]]}]
    rig.send(b"z")
    body = NOTED.get(name, {**GROUP_NAMED, "consumer": "one", "settlements": settlements})
    monkeypatch.setattr(rig.store.actions, "append", full)
    assert client.post(name.partition(" ")[2], body).status == 507
    assert "507" in operations(document)[name]["responses"]


def test_B6_a_cancellation_without_any_room_is_an_answer_in_the_document(
    rig: Rig, client: Client, document: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise DiskFullError("no space left on device")

    monkeypatch.setattr(rig.store, "cancel", full)
    body = {"message_ids": [MESSAGE_ID], "subject": "orders", "withdrawn": True}
    assert client.post("/v1/delayed/cancel", body).status == 507
    assert "507" in operations(document)["POST /v1/delayed/cancel"]["responses"]


def test_its_bodies_are_those_that_are_decoded(client: Client, document: Any) -> None:
    schema = document["components"]["schemas"]["PullRequest"]
    assert {"subject", "group", "consumer"} == set(schema["required"])
    assert schema["additionalProperties"] is False
    assert client.post("/v1/pull", {**dict.fromkeys(schema["required"], "a"), "x": 1}).status == 422
