"""The routes of those who keep the logs elsewhere, without sockets: what they take, and from whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.broker.face.asgi import Client, error_of
from tests.broker.face.guarded import Guarded
from tests.broker.face.test_roles import EVERYBODY
from tests.broker.service.rig import Rig

NAME = {"name": "archive"}


def told(rig: Rig, **changes: Any) -> dict[str, Any]:
    given = {**NAME, "store_id": rig.broker.store_id, "kept_offset": 0, "kept_actions_offset": 0}
    return given | changes


def test_a_keeper_comes_continues_is_listed_and_is_removed(rig: Rig, client: Client) -> None:
    rig.send(b"a", b"b")
    end_offset = rig.store.durable_offset
    kept = client.post("/v1/keepers/keep", told(rig)).json
    assert (kept["kept_offset"], kept["lag_bytes"], kept["lost_bytes"]) == (0, end_offset, 0)
    kept = client.post("/v1/keepers/keep", told(rig, kept_offset=end_offset)).json
    assert (kept["name"], kept["kept_offset"], kept["lag_bytes"]) == ("archive", end_offset, 0)
    rig.clock.pass_ms(90_000)
    (listed,) = client.get("/v1/keepers").json["keepers"]
    assert listed == kept | {"age_s": 90.0}
    assert client.post("/v1/keepers/remove", NAME).json == listed
    assert client.get("/v1/keepers").json == {"keepers": []}
    reply = client.post("/v1/keepers/remove", NAME)
    assert (reply.status, error_of(reply).code) == (404, "not_found")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "no/name"}, "name"),
        ({"store_id": "00" * 16}, "store_id"),
        ({"kept_offset": 10**9}, "kept_offset"),
        ({"kept_actions_offset": 10**9}, "kept_actions_offset"),
    ],
)
def test_what_cannot_be_is_refused_with_the_field_the_limit_and_a_remedy(
    rig: Rig, client: Client, changes: dict[str, Any], field: str
) -> None:
    reply = client.post("/v1/keepers/keep", told(rig, **changes))
    answer = error_of(reply)
    assert (reply.status, answer.field) == (422, field)
    assert answer.limit
    assert answer.value
    assert answer.remedy
    assert client.get("/v1/keepers").json == {"keepers": []}
    assert client.post("/v1/keepers/keep", told(rig)).status == 200, "the writer goes on"


@pytest.fixture
def guarded(rig: Rig, tmp_path: Path) -> Guarded:
    return Guarded(rig, tmp_path / "tokens.json")


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/keepers/keep", {"operator", "reader of all"}),
        ("/v1/keepers/remove", {"operator"}),
    ],
)
def test_B10_who_reads_all_may_keep_and_an_admin_of_all_may_remove(
    rig: Rig, guarded: Guarded, path: str, allowed: set[str]
) -> None:
    body = told(rig) if path.endswith("keep") else NAME
    for caller in EVERYBODY - allowed:
        reply = guarded.ask(caller, "POST", path, body)
        assert (reply.status, error_of(reply).code) == (403, "forbidden")
    assert guarded.ask(None, "POST", path, body).status == 401
    for caller in allowed:
        guarded.ask("operator", "POST", "/v1/keepers/keep", told(rig))
        assert guarded.ask(caller, "POST", path, body).status == 200
