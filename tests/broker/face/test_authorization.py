"""Every route × role × own and foreign subject × found and not found: what a caller has no role for changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from qmq_broker.face.routes.table import ROUTES
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig
from tests.broker.face.asgi import Reply
from tests.broker.face.guarded import CALLERS, Guarded

MINE, OTHERS = "orders.eu", "bills.eu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """What a request is about: something that there is, or that there is not."""

    subject: str
    group: str
    message_id: str
    delayed_id: str
    keeper: str

    @property
    def of_group(self) -> dict[str, Any]:
        return {"subject": self.subject, "group": self.group}


def thing(subject: str, number: int, *, is_found: bool) -> Thing:
    what = "known" if is_found else "unknown"
    return Thing(
        subject=subject if is_found else f"{subject}.{what}",
        group=what,
        message_id=f"{number:016x}{what.encode().hex():0>16}",
        delayed_id=f"{number + 8:016x}{what.encode().hex():0>16}",
        keeper=what,
    )


FOUND: Final = {name: thing(name, n, is_found=True) for n, name in enumerate((MINE, OTHERS))}
NOT_FOUND: Final = {name: thing(name, n, is_found=False) for n, name in enumerate((MINE, OTHERS))}
THINGS: Final = [*FOUND.values(), *NOT_FOUND.values()]
LATER_MS: Final = 40 * HOUR_MS


def send(one: Thing) -> dict[str, Any]:
    return {"messages": [{"subject": one.subject, "body": 1}]}


def pull(one: Thing) -> dict[str, Any]:
    return {**one.of_group, "consumer": "c"}


def settle(one: Thing) -> dict[str, Any]:
    return {**pull(one), "settlements": [{"token": 1, "acks": [[0, 1]]}]}


def withdrawal(one: Thing) -> dict[str, Any]:
    return {"message_ids": [one.delayed_id], "subject": one.subject, "withdrawn": True}


#: Route → the role it needs, on all subjects if that is said, and the body or query it is asked with.
Ask = Callable[[Thing], Any]
NEEDED: Final[dict[str, tuple[set[str], bool, Ask]]] = {
    "POST /v1/send": ({"producer"}, False, send),
    "POST /v1/pull": ({"consumer"}, False, pull),
    "POST /v1/settle": ({"consumer"}, False, settle),
    "GET /metrics": ({"producer", "consumer"}, True, lambda _: ""),
    "GET /v1/groups": ({"producer", "consumer"}, False, lambda one: f"?subject={one.subject}"),
    "GET /v1/dead": (
        {"consumer"},
        False,
        lambda one: f"?subject={one.subject}&group={one.group}",
    ),
    "GET /v1/messages": ({"consumer"}, False, lambda one: f"?subject={one.subject}"),
    "GET /v1/files": ({"consumer"}, True, lambda _: ""),
    "GET /v1/files/read": ({"consumer"}, True, lambda _: "?path=FORMAT&first=0&count=1"),
    "GET /v1/delayed": ({"producer", "consumer"}, False, lambda one: f"?subject={one.subject}"),
    "GET /v1/delayed/histogram": (
        {"producer", "consumer"},
        False,
        lambda one: f"?subject={one.subject}",
    ),
    "GET /v1/delayed/status": ({"producer", "consumer"}, True, lambda _: ""),
    "POST /v1/delayed/retry": (set(), True, lambda _: {}),
    "POST /v1/delayed/accept-clock": (set(), True, lambda _: {}),
    "POST /v1/delayed/cancel": ({"producer"}, False, withdrawal),
    "POST /v1/delayed/reschedule": (
        {"producer"},
        False,
        lambda one: {
            "message_id": one.delayed_id,
            "subject": one.subject,
            "deliver_at_ms": LATER_MS,
        },
    ),
    "POST /v1/subjects/remove": (set(), False, lambda one: {"subject": one.subject}),
    "GET /v1/room": ({"producer", "consumer"}, True, lambda _: ""),
    "GET /v1/keepers": ({"producer", "consumer"}, True, lambda _: ""),
    "POST /v1/keepers/keep": (
        {"consumer"},
        True,
        lambda one: {
            "name": one.keeper,
            "store_id": "0" * 32,
            "kept_offset": 0,
            "kept_actions_offset": 0,
        },
    ),
    "POST /v1/keepers/remove": (set(), True, lambda one: {"name": one.keeper}),
    "POST /v1/state": (set(), True, lambda _: {"state": "read-only"}),
    "POST /v1/groups/pause": (set(), False, lambda one: one.of_group),
    "POST /v1/groups/resume": (set(), False, lambda one: one.of_group),
    "POST /v1/groups/seek": (set(), False, lambda one: {**one.of_group, "to": "latest"}),
    "POST /v1/groups/configure": (
        set(),
        False,
        lambda one: {**one.of_group, "max_attempts": 3},
    ),
    "POST /v1/groups/remove": (set(), False, lambda one: one.of_group),
    "POST /v1/dead/replay": (set(), False, lambda one: one.of_group),
    "POST /v1/dead/purge": (set(), False, lambda one: one.of_group),
}
#: Answered to everybody, from what the caller may see: see below.
BY_ID: Final = {
    "/v1/messages/{message_id}/trace": "/v1/messages/{one.message_id}/trace",
    "/v1/messages": "/v1/messages?id={one.message_id}",
    "/v1/delayed/{message_id}": "/v1/delayed/{one.delayed_id}",
}
ABOUT_NOTHING: Final = {
    "GET /healthz",
    "GET /readyz",
    "GET /openapi.json",
    "GET /v1/caller",
    "GET /v1/subjects",
}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DelayRig]:
    rig = DelayRig(tmp_path / "data")
    yield rig
    rig.close()


@pytest.fixture
def guarded(rig: DelayRig, tmp_path: Path) -> Guarded:
    guarded = Guarded(rig, tmp_path / "tokens.json")
    for one in FOUND.values():
        for body in (
            {"subject": one.subject, "body": 1, "message_id": one.message_id},
            {
                "subject": one.subject,
                "body": 1,
                "message_id": one.delayed_id,
                "delay_ms": 8 * HOUR_MS,
            },
        ):
            sent = guarded.ask("operator", "POST", "/v1/send", {"messages": [body]})
            assert sent.status == 200, sent.body
        asked = {**pull(one), "wait_ms": 0}
        assert guarded.ask("operator", "POST", "/v1/pull", asked).status == 200
    return guarded


def has_role(caller: str, roles: set[str], subject: str, *, is_about_all: bool) -> bool:
    """By the roles that the caller's token was made with."""
    for text in CALLERS[caller]:
        role, _, subjects = text.partition(":")
        if role in {"admin", *roles}:
            is_theirs = subject.startswith(subjects.removesuffix("*"))
            if not subjects or (is_theirs and not is_about_all):
                return True
    return False


def state_of(rig: DelayRig) -> tuple[Any, ...]:
    """What a request might change: both logs, the remembered ids, the registered subjects and groups, the state."""
    broker, store = rig.broker, rig.store
    return (
        store.written_offset,
        store.actions.log.written_offset,
        store.remembered_ids,
        sorted(store.subjects()),
        sorted(broker.intake._subjects),
        broker.query.groups(now_ms=rig.now_ms),
        broker.delayed.query.status(),
        broker.keeping.statuses(rig.now_ms),
        broker.serving.state,
    )


def ask(guarded: Guarded, caller: str, route: str, given: Any) -> Reply:
    method, path = route.split(" ", 1)
    if method == "GET":
        return guarded.ask(caller, method, path + given)
    return guarded.ask(caller, method, path, given)


def test_every_route_is_tried_here() -> None:
    tried = {*NEEDED, *ABOUT_NOTHING, *(f"GET {path}" for path in BY_ID)}
    assert {route.name for route in ROUTES} == tried


@pytest.mark.parametrize("route", NEEDED)
def test_B10_what_the_caller_has_no_role_for_is_refused_found_or_not_and_changes_nothing(
    rig: DelayRig, guarded: Guarded, route: str
) -> None:
    roles, is_about_all, given = NEEDED[route]
    refused = 0
    for caller in CALLERS:
        for one in THINGS:
            if has_role(caller, roles, one.subject, is_about_all=is_about_all):
                continue
            before = state_of(rig)
            reply = ask(guarded, caller, route, given(one))
            assert reply.status == 403, (caller, one.subject, reply.body)
            assert state_of(rig) == before, (caller, one.subject)
            refused += 1
    assert refused


@pytest.mark.parametrize("route", NEEDED)
def test_B10_what_the_caller_has_a_role_for_is_not_refused(guarded: Guarded, route: str) -> None:
    roles, is_about_all, given = NEEDED[route]
    for caller in CALLERS:
        for one in THINGS:
            if has_role(caller, roles, one.subject, is_about_all=is_about_all):
                reply = ask(guarded, caller, route, given(one))
                assert reply.status in (200, 404, 409, 422), (caller, one.subject, reply.body)
                # For the next caller
                guarded.ask("operator", "POST", "/v1/state", {"state": "serving"})


@pytest.mark.parametrize("path", BY_ID)
def test_B10_an_id_of_others_is_answered_as_one_that_nobody_has(
    rig: DelayRig, guarded: Guarded, path: str
) -> None:
    for caller in CALLERS:
        for subject in (MINE, OTHERS):
            found, missing = FOUND[subject], NOT_FOUND[subject]
            before = state_of(rig)
            known = guarded.ask(caller, "GET", BY_ID[path].format(one=found))
            unknown = guarded.ask(caller, "GET", BY_ID[path].format(one=missing))
            assert state_of(rig) == before
            told = known.body
            for of_found, of_missing in (
                (found.message_id, missing.message_id),
                (found.delayed_id, missing.delayed_id),
            ):
                told = told.replace(of_found.encode(), of_missing.encode())
            is_same = (known.status, told) == (unknown.status, unknown.body)
            may_read = has_role(caller, {"consumer"}, subject, is_about_all=False)
            assert is_same is not may_read, (caller, subject)


def withdraw(guarded: Guarded, caller: str, subject: str | None, *ids: str) -> Reply:
    body = {"message_ids": list(ids), "subject": subject, "withdrawn": True}
    return guarded.ask(caller, "POST", "/v1/delayed/cancel", body)


def test_S7_a_withdrawal_names_its_subject(rig: DelayRig, guarded: Guarded) -> None:
    before = state_of(rig)
    for caller in ("operator", "producer"):
        reply = withdraw(guarded, caller, None, "ab" * 16)
        assert (reply.status, reply.json["field"]) == (422, "subject")
        assert "several requests" in reply.json["remedy"]
    assert state_of(rig) == before


@pytest.mark.parametrize("subject", ["", "no name", "-", "*", "orders.*"])
def test_S7_a_withdrawal_of_no_subject_is_refused(guarded: Guarded, subject: str) -> None:
    assert withdraw(guarded, "operator", subject, "ab" * 16).status == 422


def test_B7_ids_withdrawn_from_one_subject_are_stored_under_another(
    rig: DelayRig, guarded: Guarded
) -> None:
    """The ids of the broker are dense: whoever knows one knows those that come next."""
    sent = guarded.ask("producer", "POST", "/v1/send", send(FOUND[MINE])).json["message_ids"][0]
    ahead = [f"{int(sent, 16) + number:032x}" for number in range(1, 101)]
    assert withdraw(guarded, "producer", MINE, *ahead).status == 200
    body = guarded.ask("operator", "POST", "/v1/send", send(FOUND[OTHERS])).json
    assert body["message_ids"] == ahead[:1]
    assert body["duplicates"] == 0
    own = guarded.ask("operator", "POST", "/v1/send", send(FOUND[MINE])).json
    assert own["message_ids"] == ahead[1:2]
    assert own["duplicates"] == 1, "of its own subject it stays out"


@pytest.mark.parametrize("is_delayed", [False, True], ids=["stored", "delayed"])
def test_B7_who_stores_the_ids_of_others_first_does_not_keep_them_out(
    rig: DelayRig, guarded: Guarded, *, is_delayed: bool
) -> None:
    wanted = {"body": 1, "message_id": "ab" * 16, **({"delay_ms": HOUR_MS} if is_delayed else {})}
    for caller, subject in (("producer", MINE), ("operator", OTHERS)):
        for duplicates in (0, 1):
            body = {"messages": [{**wanted, "subject": subject}]}
            reply = guarded.ask(caller, "POST", "/v1/send", body)
            assert (reply.status, reply.json["duplicates"]) == (200, duplicates)
    rig.pass_and_release(2 * HOUR_MS)
    assert len(rig.bodies(MINE)) == len(rig.bodies(OTHERS)) == 2


def test_D4_an_id_of_several_subjects_is_cancelled_in_those_of_the_caller(
    rig: DelayRig, guarded: Guarded
) -> None:
    message_id = "ab" * 16
    for subject in (MINE, OTHERS):
        message = {
            "subject": subject,
            "body": 1,
            "message_id": message_id,
            "delay_ms": 2 * HOUR_MS,
        }
        assert guarded.ask("operator", "POST", "/v1/send", {"messages": [message]}).status == 200
    body: dict[str, Any] = {"message_id": message_id, "deliver_at_ms": rig.now_ms + 3 * HOUR_MS}
    reply = guarded.ask("operator", "POST", "/v1/delayed/reschedule", body)
    assert (reply.status, reply.json["field"]) == (422, "subject"), "which of them?"
    named = {**body, "subject": OTHERS}
    assert guarded.ask("operator", "POST", "/v1/delayed/reschedule", named).status == 200
    cancel = {"message_ids": [message_id]}
    reply = guarded.ask("producer", "POST", "/v1/delayed/cancel", cancel)
    assert reply.json["outcomes"] == ["cancelled"]
    rig.pass_and_release(4 * HOUR_MS)
    assert (len(rig.bodies(MINE)), len(rig.bodies(OTHERS))) == (1, 2)
    outcome = guarded.ask("operator", "POST", "/v1/delayed/cancel", cancel).json["outcomes"]
    assert outcome == ["too_late"], "it was delivered in one of them"


def test_a_search_by_id_counts_only_what_the_caller_may_see(guarded: Guarded) -> None:
    for subject in (MINE, *(f"{OTHERS}.{number}" for number in range(5))):
        body = {"messages": [{"subject": subject, "body": 1, "message_id": "ab" * 16}]}
        assert guarded.ask("operator", "POST", "/v1/send", body).status == 200
    found = guarded.ask("consumer", "GET", f"/v1/messages?id={'ab' * 16}&count=1").json
    assert [one["subject"] for one in found["messages"]] == [MINE]
    assert not found["has_more"]
