"""The OpenAPI document is what the routes do: their paths, parameters, bodies and statuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import QueryParams
from starlette.requests import Request

from qmq_broker.errors import DiskFullError
from qmq_broker.face.routes.route import Route
from qmq_broker.face.routes.table import ROUTES
from qmq_broker.face.strict_json import read_json
from tests.broker.face.asgi import Client
from tests.broker.face.guarded import Guarded
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


def test_it_has_every_route_and_no_other(document: Any) -> None:
    assert operations(document).keys() == {route.name for route in ROUTES}


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


def test_a_token_is_asked_for_only_where_there_are_some(
    rig: Rig, document: Any, tmp_path: Path
) -> None:
    assert "security" not in json.dumps(document)
    guarded = Guarded(rig, tmp_path / "tokens.json")
    told = guarded.ask("producer", "GET", "/openapi.json").json
    assert list(told["components"]["securitySchemes"]) == ["token"]
    free = {name for name, one in operations(told).items() if one["security"] == []}
    assert free == {"GET /healthz", "GET /readyz"}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_an_example_has_the_form_that_the_document_says(
    client: Client, document: Any, route: Route[Any]
) -> None:
    if route.body is not None:
        json_body = operations(document)[route.name]["requestBody"]["content"]["application/json"]
        assert read_json(json.dumps(json_body["example"]).encode(), route.body) is not None
    for one in operations(document)[route.name]["parameters"]:
        if one["in"] == "query":
            assert matches(one["example"], one["schema"]), one


def matches(value: Any, schema: Any) -> bool:
    if schema["type"] == "integer":
        return bool(schema["minimum"] <= value <= schema["maximum"])
    is_one = value in schema.get("enum", [value])
    return is_one and re.search(schema.get("pattern", ""), value) is not None


@pytest.mark.parametrize("text", ["", "a", "a@b", "-a", "a\n", "a" * 127, "a" * 128, "ä", "a b"])
def test_a_name_is_taken_where_the_document_says_so(
    client: Client, document: Any, text: str
) -> None:
    fields = document["components"]["schemas"]["PullRequest"]["properties"]
    for field in ("subject", "group", "consumer"):
        is_said = (
            re.search(fields[field]["pattern"].replace("$", r"\Z"), text) is not None
            and len(text) <= fields[field]["maxLength"]
        )
        body = {"subject": SUBJECT, "group": "g", "consumer": "c", field: text}
        assert (client.post("/v1/pull", body).status == 200) is is_said, field


OPERATIONS = {route.name: route for route in ROUTES}
QUESTIONS = [name for name in OPERATIONS if name.startswith("GET ")]
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
