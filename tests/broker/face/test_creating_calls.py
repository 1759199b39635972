"""B10: whatever a call creates is bounded, and the refusal beyond the bound names it and when to come back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.serving import Serving
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig
from tests.broker.face.asgi import Client, Reply
from tests.broker.service.rig import make_frame

#: The bound of each kind; how often more is asked for, at most, and again once that was refused.
BOUND: Final = 20
CALLS_MAX: Final = 1_000
CALLS_BEYOND: Final = 5
#: Of memory, where that is the bound: some hundred bytes for each message, consumer or group.
BOUND_BYTES: Final = 30_000
NAMES: Final = {"subject": "orders", "group": "g", "consumer": "c"}


def send(client: Client, number: int, **changes: Any) -> Reply:
    message = {"subject": f"s{number}", "body": 1, **changes}
    return client.post("/v1/send", {"messages": [message]})


def pull(client: Client, **changes: Any) -> Reply:
    return client.post("/v1/pull", {**NAMES, "max_messages": 1, **changes})


def settle(client: Client, outcome: str, **changes: Any) -> Reply:
    """Pull one message and settle it so."""
    given = pull(client)
    if given.status != 200 or not given.json["messages"]:
        return given
    first = given.json["messages"][0]["pull_sequence"]
    one = {"token": given.json["token"], outcome: [{"range": [first, first + 1], **changes}]}
    reply = client.post("/v1/settle", {**NAMES, "settlements": [one]})
    assert reply.status == 200
    return reply


def give_back_and_replay(client: Client, number: int) -> Reply:
    """A dead letter again and again among the messages of a group; the others wait."""
    if number == 0:
        settle(client, "rejects", reason="no")
        for _ in range(BOUND):
            pull(client)
    return client.post("/v1/dead/replay", {"subject": "orders", "group": "g"})


def member(client: Client, number: int) -> Reply:
    return pull(client, consumer=f"c{number}", broadcast="ephemeral", start="latest")


def groups(rig: DelayRig) -> int:
    return len(rig.broker.query.groups())


def subjects(rig: DelayRig) -> int:
    return rig.broker.intake.subjects_count


def memory(rig: DelayRig) -> int:
    return rig.broker.delivery.budget.memory_bytes


def in_flight(rig: DelayRig) -> int:
    return sum(one.in_flight for one in rig.broker.query.groups())


def dead(rig: DelayRig) -> int:
    return sum(one.dead for one in rig.broker.query.groups())


def consumers(rig: DelayRig) -> int:
    return sum(state.consumer_count for state in rig.broker.delivery.groups())


Ask = Callable[[Client, int], Reply]
#: Limits, what is asked for again and again, the field that is named at last, what is counted, and the most of it.
REFUSED: Final[dict[str, tuple[dict[str, int], Ask, str, Callable[[DelayRig], int], int]]] = {
    "subjects": ({"subjects": BOUND}, send, "subjects", subjects, BOUND),
    "subjects of delayed messages": (
        {"subjects": BOUND},
        lambda client, n: send(client, n, delay_ms=HOUR_MS),
        "subjects",
        subjects,
        BOUND,
    ),
    "groups": (
        {"groups": BOUND},
        lambda client, n: pull(client, group=f"g{n}"),
        "groups",
        groups,
        BOUND,
    ),
    "members of a broadcast": ({"groups": BOUND}, member, "groups", groups, BOUND),
    "memory of groups": (
        {"groups_bytes": BOUND_BYTES},
        lambda client, n: pull(client, group=f"g{n}"),
        "memory of all groups",
        memory,
        2 * BOUND_BYTES,
    ),
    "memory of members of a broadcast": (
        {"groups_bytes": BOUND_BYTES},
        member,
        "memory of all groups",
        memory,
        2 * BOUND_BYTES,
    ),
    "memory of messages in flight": (
        {"groups_bytes": BOUND_BYTES},
        lambda client, n: pull(client, max_messages=20),
        "memory of all groups",
        memory,
        2 * BOUND_BYTES,
    ),
    "memory of messages given back": (
        {"groups_bytes": BOUND_BYTES},
        lambda client, n: settle(client, "nacks", error="e" * 500, delay_ms=HOUR_MS // 2),
        "memory of all groups",
        memory,
        2 * BOUND_BYTES,
    ),
    "memory of long retries": (
        {"groups_bytes": BOUND_BYTES},
        lambda client, n: settle(client, "nacks", error="e" * 500, delay_ms=5 * HOUR_MS),
        "memory of all groups",
        memory,
        2 * BOUND_BYTES,
    ),
    "memory of dead letters": (
        {"groups_bytes": BOUND_BYTES},
        lambda client, n: settle(client, "rejects", reason="r" * 500),
        "memory of all groups",
        memory,
        2 * BOUND_BYTES,
    ),
    "dead letters": (
        {"dead_letters_per_group": BOUND},
        lambda client, n: settle(client, "rejects", reason="no"),
        "dead letters of a group",
        dead,
        BOUND,
    ),
    "consumers of a group": (
        {"consumers_per_group": BOUND},
        lambda client, n: pull(client, consumer=f"c{n}"),
        "consumers of a group",
        consumers,
        BOUND,
    ),
    "messages of a consumer": (
        {"in_flight_per_consumer": BOUND},
        lambda client, n: pull(client),
        "unsettled messages of a consumer",
        in_flight,
        BOUND,
    ),
    "messages of a group": (
        {"unsettled_per_group": BOUND},
        give_back_and_replay,
        "unsettled messages of a group",
        in_flight,
        BOUND,
    ),
}


def filled(directory: Path, limits: dict[str, int], **options: int) -> Client:
    """A broker with these limits and many messages in one subject."""
    rig = DelayRig(directory, limits=ServiceLimits(**limits), **options)
    rig.submit(make_frame([b"x"] * 2_000))
    rig.commit()
    return Client(rig)


def assert_refused(reply: Reply, field: str) -> None:
    assert reply.status in (429, 503, 507)
    assert int(reply.headers[b"retry-after"]) >= 1
    refusal = reply.json
    assert refusal["field"] == field, refusal
    assert refusal["limit"]
    assert refusal["message"]


@pytest.mark.parametrize("kind", REFUSED)
def test_B10_what_a_call_creates_is_refused_at_its_bound_by_name(tmp_path: Path, kind: str) -> None:
    limits, ask, field, count, most = REFUSED[kind]
    client = filled(tmp_path, limits)
    rig = client.rig
    assert isinstance(rig, DelayRig)
    number = next(n for n in range(CALLS_MAX) if ask(client, n).status != 200)
    for beyond in range(number + 1, number + 1 + CALLS_BEYOND):
        assert_refused(ask(client, beyond), field)
    assert 0 < count(rig) <= most
    rig.restart()
    assert count(rig) <= most
    rig.close()


def test_B10_pulls_that_wait_are_refused_at_their_bound_by_name(tmp_path: Path) -> None:
    client = filled(tmp_path, {"waiting_pulls": BOUND})
    waiting = client.rig.broker.delivery.waiting
    wait = {"subject": "empty", "group": "g", "wait_ms": 40_000}

    async def run() -> None:
        asked = [
            asyncio.ensure_future(
                client.call("POST", "/v1/pull", json.dumps({**wait, "consumer": f"c{n}"}).encode())
            )
            for n in range(2 * BOUND)
        ]
        refused, begun = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        while len(refused) < BOUND:
            refused, begun = await asyncio.wait(asked, timeout=0.01)
        assert (len(refused), waiting.count) == (BOUND, BOUND)
        for one in refused:
            assert_refused(one.result(), "waiting pulls")
        client.rig.broker.serving.become(Serving.DRAINING, "the test ends")
        waiting.wake_all()
        await asyncio.wait(begun)
        assert waiting.count == 0

    asyncio.run(asyncio.wait_for(run(), 60))
    client.rig.close()


@pytest.mark.parametrize("delay_ms", [None, HOUR_MS])
def test_B6_messages_and_delayed_ones_are_refused_by_name_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delay_ms: int | None
) -> None:
    client = filled(tmp_path, {}, reserve_bytes=1_000_000)
    monkeypatch.setattr(client.rig.store.disk, "free_bytes", lambda: 900_000)
    changes = {} if delay_ms is None else {"delay_ms": delay_ms}
    send(client, 0, body="x" * 1_000_000, **changes)
    replies = [send(client, n, body="x" * 1_000_000, **changes) for n in range(20)]
    assert_refused(replies[-1], "free space of the disk")
    assert replies[-1].status == 507
    assert "1000000 bytes" in replies[-1].json["limit"]
    client.rig.close()


def withdraw(client: Client, number: int) -> Reply:
    ids = [f"{number:016x}{n:016x}" for n in range(10)]
    body = {"message_ids": ids, "subject": "orders", "withdrawn": True}
    return client.post("/v1/delayed/cancel", body)


def remember(client: Client, number: int) -> Reply:
    messages = [{"subject": "orders", "body": n} for n in range(10)]
    return client.post("/v1/send", {"messages": messages})


@pytest.mark.parametrize("make", [withdraw, remember])
def test_B10_ids_are_remembered_up_to_their_bound_and_none_is_refused(
    tmp_path: Path, make: Ask
) -> None:
    """The oldest are forgotten, a part of them at a time."""
    client = filled(tmp_path, {}, dedupe_ids=10 * BOUND)
    store = client.rig.store
    for number in range(2 * BOUND):
        assert make(client, number).status == 200
    assert 5 * BOUND <= store.remembered_ids <= 12 * BOUND
    client.rig.restart()
    assert client.rig.store.remembered_ids <= 12 * BOUND
    client.rig.close()


def test_B10_of_delayed_messages_as_many_are_in_memory_as_the_bound_says(tmp_path: Path) -> None:
    """They are on the disk, which is their bound; all of them come."""
    client = filled(tmp_path, {"delayed_loaded": BOUND})
    rig = client.rig
    assert isinstance(rig, DelayRig)
    near = rig.broker.delayed.releaser.near
    for number in range(10 * BOUND):
        assert send(client, 0, delay_ms=60_000 + number * 100).status == 200
        rig.broker.delayed.releaser.step()
        assert near.loaded <= 2 * BOUND
    rig.pass_and_release(120_000)
    rig.release()
    assert rig.broker.delayed.query.status().pending == 0
    queue = rig.store.queue("s0")
    assert queue is not None
    assert queue.next_sequence == 10 * BOUND
    rig.close()
