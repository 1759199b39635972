"""B10: with hardly any room for anything, all is refused in time or done whole, and the broker serves on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import pytest

from qmq_broker.service.limits import ServiceLimits
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig
from tests.broker.face.asgi import Client, Reply

#: The most of each bound; the least is 1.
SMALL: Final = {
    "subjects": 5,
    "groups": 5,
    "groups_bytes": 20_000,
    "consumers_per_group": 4,
    "in_flight_per_consumer": 10,
    "unsettled_per_group": 20,
    "dead_letters_per_group": 8,
    "long_retries_per_group": 5,
    "pull_messages": 20,
    "pull_bytes": 2_000,
    "settlement_ranges": 10,
    "dead_letters_per_request": 5,
    "own_frame_bytes": 500,
    "overdue_per_s": 10,
    "groups_per_pass": 3,
    "leases_ended_per_pass": 4,
    "redelivery_horizon_ms": 5_000,
}
STEPS: Final = 100
BUSY: Final = {429, 503, 507}


class Caller:
    """Asks for whatever makes something, and keeps what it was given."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        chosen = self.draw.sample(sorted(SMALL), 5)
        bounds = {name: self.draw.randint(1, SMALL[name]) for name in chosen}
        limits = ServiceLimits(dead_letters_memory_bytes=1, **bounds)
        self.rig = DelayRig(directory, limits=limits)
        self.client = Client(self.rig)
        self.given: list[tuple[dict[str, str], Any]] = []
        self.refused = 0

    def ask(self, path: str, body: object = None) -> Reply:
        reply = self.client.get(path) if body is None else self.client.post(path, body)
        assert reply.status < 500 or reply.status in BUSY, (path, body, reply)
        if reply.status in BUSY:
            self.refused += 1
            assert int(reply.headers[b"retry-after"]) > 0
            assert reply.json["message"]
        return reply

    def state(self) -> object:
        query = self.rig.broker.query
        groups = [
            (one.subject, one.group, one.cursor, one.in_flight, one.redelivery, one.dead, one.acked)
            for one in query.groups()
        ]
        return query.subjects(), sorted(groups)

    def groups(self) -> set[tuple[str, str]]:
        return {(one.subject, one.group) for one in self.rig.broker.query.groups()}

    def send(self) -> None:
        messages: list[dict[str, Any]] = [
            {"subject": f"s{self.draw.randrange(8)}", "body": "x" * self.draw.randrange(900)}
            for _ in range(self.draw.choice([1, 1, 3, 12]))
        ]
        if self.draw.random() < 0.3:
            for one in messages:
                one["delay_ms"] = self.draw.randrange(HOUR_MS)
        before = self.state()
        if self.ask("/v1/send", {"messages": messages}).status != 200:
            assert self.state() == before, "nothing of a refused request is stored"

    def pull(self) -> None:
        names = {name: f"{name[0]}{self.draw.randrange(8)}" for name in ("subject", "group")}
        names["consumer"] = f"c{self.draw.randrange(6)}"
        if self.given and self.draw.random() < 0.3:
            names = self.given[-1][0]
        more = {"max_messages": self.draw.choice([1, 20]), "max_attempts": self.draw.randint(1, 3)}
        lease_ms = self.draw.choice([50, 1_000, 60_000])
        before = self.groups()
        reply = self.ask("/v1/pull", {**names, **more, "lease_ms": lease_ms})
        assert reply.status == 200 or self.groups() == before, "a refused pull makes no group"
        if reply.status == 200 and reply.json["messages"]:
            self.given.append((names, reply.json))

    def settle(self) -> None:
        if not self.given:
            return
        names, answer = self.given.pop(self.draw.randrange(len(self.given)))
        first = answer["messages"][0]["pull_sequence"]
        run = [first, first + len(answer["messages"])]
        error, delay_ms = "e" * self.draw.randrange(3_000), self.draw.choice([0, 100, 3 * HOUR_MS])
        outcomes: list[dict[str, Any]] = [
            {"acks": [run]},
            {"nacks": [{"range": run, "error": error, "delay_ms": delay_ms}]},
            {"rejects": [{"range": run, "reason": error[:500]}]},
            {"extends": [{"range": run, "lease_ms": 5_000}]},
        ]
        outcome = self.draw.choice(outcomes)
        self.ask("/v1/settle", {**names, "settlements": [{"token": answer["token"], **outcome}]})

    def change(self) -> None:
        where = {"subject": f"s{self.draw.randrange(8)}", "group": f"g{self.draw.randrange(8)}"}
        change = self.draw.choice(["dead/replay", "dead/purge", "groups/remove", "groups/seek"])
        self.ask(f"/v1/{change}", where | ({"to": "earliest"} if change.endswith("seek") else {}))
        self.ask("/v1/subjects/remove", {"subject": where["subject"]})

    def pass_time(self) -> None:
        self.rig.pass_and_release(self.draw.choice([10, 3_000, HOUR_MS]))
        self.rig.broker.delivery.step(self.rig.now_ms)


@pytest.mark.parametrize("seed", range(8))
def test_B10_with_hardly_any_room_nothing_is_done_by_halves(tmp_path: Path, seed: int) -> None:
    caller = Caller(tmp_path, seed)
    works = [caller.send, caller.send, caller.pull, caller.pull, caller.settle]
    for _ in range(STEPS):
        caller.draw.choice([*works, caller.change, caller.pass_time])()
        for path in ("/healthz", "/v1/groups", "/v1/subjects", "/v1/room"):
            assert caller.ask(path).status == 200
    assert caller.refused, "or the bounds were too high to matter"
    caller.rig.store.actions.sync()
    before = caller.state()
    caller.rig.restart()
    assert caller.state() == before
    caller.rig.close()
