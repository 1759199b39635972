"""Every route with every role: who is let through, who is refused, and what lists leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qmq_broker.face.authentication.tokens import new_token
from qmq_broker.face.routes.table import ROUTES
from tests.broker.face.asgi import Client, error_of
from tests.broker.face.guarded import CALLERS, Guarded
from tests.broker.service.rig import Rig

MINE, OTHERS = "orders.eu", "bills"
IDS = {MINE: "ab" * 16, OTHERS: "cd" * 16}
SEND = {"messages": [{"subject": MINE, "body": "a"}]}
PULL = {"subject": MINE, "group": "g", "consumer": "c"}
SETTLE = {**PULL, "settlements": [{"token": 1, "acks": [[0, 1]]}]}
EVERYBODY = set(CALLERS)
#: What is asked, and who is let through; about a subject of the callers with one.
ASKED: dict[str, tuple[str, str, dict[str, Any] | None, set[str]]] = {
    "POST /v1/send": ("POST", "/v1/send", SEND, {"producer", "admin", "operator"}),
    "POST /v1/pull": ("POST", "/v1/pull", PULL, EVERYBODY - {"producer"}),
    "POST /v1/settle": ("POST", "/v1/settle", SETTLE, EVERYBODY - {"producer"}),
    "GET /openapi.json": ("GET", "/openapi.json", None, EVERYBODY),
    "GET /v1/caller": ("GET", "/v1/caller", None, EVERYBODY),
    "GET /v1/subjects": ("GET", "/v1/subjects", None, EVERYBODY),
    "GET /metrics": ("GET", "/metrics", None, {"operator", "reader of all"}),
    "GET /v1/groups": ("GET", f"/v1/groups?subject={MINE}", None, EVERYBODY),
    "GET /v1/dead": ("GET", f"/v1/dead?subject={MINE}&group=g", None, EVERYBODY - {"producer"}),
    "GET /v1/messages": ("GET", f"/v1/messages?subject={MINE}", None, EVERYBODY - {"producer"}),
    "GET /v1/messages/{message_id}/trace": (
        "GET",
        f"/v1/messages/{IDS[MINE]}/trace",
        None,
        EVERYBODY - {"producer"},
    ),
    "GET /v1/files": ("GET", "/v1/files", None, {"operator", "reader of all"}),
    "GET /v1/files/read": (
        "GET",
        "/v1/files/read?path=FORMAT&first=0&count=1",
        None,
        {"operator", "reader of all"},
    ),
    "GET /v1/delayed": ("GET", f"/v1/delayed?subject={MINE}", None, EVERYBODY),
    "GET /v1/delayed/histogram": (
        "GET",
        f"/v1/delayed/histogram?subject={MINE}",
        None,
        EVERYBODY,
    ),
    "GET /v1/delayed/status": ("GET", "/v1/delayed/status", None, {"operator", "reader of all"}),
    "POST /v1/delayed/retry": ("POST", "/v1/delayed/retry", {}, {"operator"}),
    "POST /v1/delayed/accept-clock": ("POST", "/v1/delayed/accept-clock", {}, {"operator"}),
    "GET /v1/room": ("GET", "/v1/room", None, {"operator", "reader of all"}),
    "GET /v1/keepers": ("GET", "/v1/keepers", None, {"operator", "reader of all"}),
    "POST /v1/state": ("POST", "/v1/state", {"state": "serving"}, {"operator"}),
}
GROUP = {"subject": MINE, "group": "g"}
ADMINS = {"admin", "operator"}
CHANGES: dict[str, dict[str, Any]] = {
    "/v1/groups/pause": {},
    "/v1/groups/resume": {},
    "/v1/groups/seek": {"to": "earliest"},
    "/v1/groups/configure": {"max_attempts": 3},
    "/v1/groups/remove": {},
    "/v1/dead/replay": {},
    "/v1/dead/purge": {},
}
ASKED |= {
    f"POST {path}": ("POST", path, {**GROUP, **more}, ADMINS) for path, more in CHANGES.items()
}
#: A subject is removed only when it is empty: test_authorization.py; delayed messages by their ids:
#: test_delayed_roles.py; keepers of a store by its id: test_keeper_routes.py.
ELSEWHERE = {
    "POST /v1/subjects/remove",
    "POST /v1/keepers/keep",
    "POST /v1/keepers/remove",
    "GET /v1/delayed/{message_id}",
    "POST /v1/delayed/cancel",
    "POST /v1/delayed/reschedule",
}
OPEN = {route.name for route in ROUTES if route.is_open}


@pytest.fixture
def guarded(rig: Rig, tmp_path: Path) -> Guarded:
    guarded = Guarded(rig, tmp_path / "tokens.json")
    for subject in (MINE, OTHERS):
        message = {"subject": subject, "body": "x", "message_id": IDS[subject]}
        sent = guarded.ask("operator", "POST", "/v1/send", {"messages": [message]})
        assert sent.status == 200
        pull = {**PULL, "subject": subject}
        assert guarded.ask("operator", "POST", "/v1/pull", pull).status == 200
    return guarded


def test_every_route_is_tried_here() -> None:
    assert {"GET /healthz", "GET /readyz"} == OPEN
    assert {route.name for route in ROUTES} == {*ASKED, *OPEN, *ELSEWHERE}


@pytest.mark.parametrize("route", ASKED)
def test_B10_a_route_serves_those_with_its_role_and_nobody_else(
    guarded: Guarded, route: str
) -> None:
    method, path, body, allowed = ASKED[route]
    for caller in EVERYBODY - allowed:
        reply = guarded.ask(caller, method, path, body)
        if route.endswith("/trace"):
            assert reply.status == 404, "a message of others is not there"
            continue
        answer = error_of(reply)
        assert (reply.status, answer.code, answer.field) == (403, "forbidden", "subject")
        assert "qmq broker token add" in answer.remedy
    for caller in allowed:
        guarded.ask("operator", "POST", "/v1/pull", PULL)  # the group, should it be removed
        reply = guarded.ask(caller, method, path, body)
        assert reply.status == 200, reply.body


@pytest.mark.parametrize("route", ASKED)
def test_a_stranger_is_refused_everywhere_with_the_same_answer(
    guarded: Guarded, route: str
) -> None:
    method, path, body, _ = ASKED[route]
    guarded.tokens |= {"unknown": new_token()[1], "nonsense": "x" * 500}
    answers = [guarded.ask(who, method, path, body) for who in (None, "unknown", "nonsense")]
    assert {reply.status for reply in answers} == {401}
    assert len({reply.body for reply in answers}) == 1
    assert {reply.headers[b"www-authenticate"] for reply in answers} == {b"Bearer"}
    assert guarded.authenticator.step() == 3


@pytest.mark.parametrize("route", sorted(OPEN))
def test_health_is_open_and_says_nothing(guarded: Guarded, route: str) -> None:
    reply = guarded.ask(None, "GET", route.removeprefix("GET "))
    assert reply.status == 200
    assert MINE not in reply.body.decode()


def test_the_subjects_of_others_are_refused(guarded: Guarded) -> None:
    for method, path, body, _ in ASKED.values():
        if body is not None:
            theirs = json.loads(json.dumps(body).replace(MINE, OTHERS))
            for caller in ("producer", "consumer", "admin"):
                assert guarded.ask(caller, method, path, theirs).status == 403, path


def test_a_send_with_one_forbidden_subject_stores_nothing(rig: Rig, guarded: Guarded) -> None:
    mixed = {"messages": [{"subject": MINE, "body": "a"}, {"subject": "not.mine", "body": "b"}]}
    reply = guarded.ask("producer", "POST", "/v1/send", mixed)
    assert (reply.status, error_of(reply).value) == (403, "not.mine")
    assert guarded.ask("operator", "GET", f"/v1/messages?subject={MINE}").json["messages"][1:] == []
    assert rig.store.subjects() == [OTHERS, MINE]
    assert "not.mine" not in rig.broker.intake._subjects, "a refused name takes no place"


def test_a_message_is_found_by_its_id_by_those_who_may_read_it(guarded: Guarded) -> None:
    for subject, message_id in IDS.items():
        path = f"/v1/messages?id={message_id}"
        found = {
            caller: len(guarded.ask(caller, "GET", path).json["messages"]) for caller in CALLERS
        }
        everywhere = {"operator": 1, "reader of all": 1}
        own = {"consumer": 1, "admin": 1} if subject == MINE else {}
        assert found == dict.fromkeys(CALLERS, 0) | everywhere | own


def test_why_the_broker_does_not_serve_is_told_to_those_it_knows(
    rig: Rig, guarded: Guarded
) -> None:
    rig.broker.set_read_only(True, "the disk of ward 3")
    told = {who: guarded.ask(who, "GET", "/readyz").json for who in (None, "producer")}
    assert [one["status"] for one in told.values()] == ["read-only", "read-only"]
    assert [one["reason"] for one in told.values()] == ["", "the disk of ward 3"]


@pytest.mark.parametrize("path", ["/v1/subjects", "/v1/groups"])
def test_lists_show_what_the_caller_has_to_do_with(guarded: Guarded, path: str) -> None:
    shown = guarded.ask("operator", "GET", path).body.decode()
    assert OTHERS in shown
    assert MINE in shown
    theirs = guarded.ask("consumer", "GET", path).body.decode()
    assert OTHERS not in theirs
    assert MINE in theirs


@pytest.mark.parametrize(
    "path",
    ["/v1/messages", "/v1/dead", "/v1/messages?subject=*", "/v1/groups?subject=bills",
     "/v1/messages?subject=orders.eu&subject=bills", "/v1/dead?group=g"],
)  # fmt: skip
def test_a_question_about_others_or_about_all_is_refused(guarded: Guarded, path: str) -> None:
    assert guarded.ask("consumer", "GET", path).status in (403, 422)
    assert OTHERS not in guarded.ask("consumer", "GET", path).body.decode().replace(
        f'"value":"{OTHERS}"', ""
    ).replace(f"'{OTHERS}'", "")


@pytest.mark.parametrize("route", ["GET /v1/files", "GET /v1/files/read", "POST /v1/state"])
def test_a_subject_in_the_query_does_not_open_what_is_about_all(
    guarded: Guarded, route: str
) -> None:
    method, path, body, _ = ASKED[route]
    path += f"{'&' if '?' in path else '?'}subject={MINE}"
    for caller in ("producer", "consumer", "admin"):
        assert guarded.ask(caller, method, path, body).status == 403


def test_who_is_asking_is_answered(guarded: Guarded) -> None:
    told = guarded.ask("consumer", "GET", "/v1/caller").json
    assert told["name"].startswith("consumer (")
    assert told["roles"] == ["consumer:orders.*"]


def test_without_tokens_everybody_may_do_everything(rig: Rig) -> None:
    client = Client(rig)
    assert client.post("/v1/send", SEND).status == 200
    assert client.post("/v1/state", {"state": "serving"}).status == 200
    assert client.get("/v1/caller").json["name"] == "anybody"
