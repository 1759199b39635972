"""B10: nothing that a caller asks for holds up the loop, and with it everybody else.

Measured is the processor time of the loop's thread in one turn of the loop: other programs do not change that.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest

from qmq_client.group.dead_letters import BLOCK_LETTERS_MAX, REJECTED, DeadLetter
from qmq_client.wire.frame import FrameKind, build_message_frame
from qmq_client.wire.message_id import format_message_id
from qmq_client.wire.record import Record, encode_record, record_message_id
from qmq_client.wire.requests import Nack, PullRequest, Settlement, Tags, encode_control
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig
from tests.broker.face.asgi import FRAME, JSON, Client, Reply, Wire, make_scope
from tests.broker.service.rig import SUBJECT, Rig, make_frame, new_ids
from tests.kit.clock import FakeClock

TURN_S_MAX: Final = 0.05
#: Of a million dead letters those that a turn concerns: some thousands.
TURN_OF_LETTERS_S_MAX: Final = 0.02
MANY: Final = 10_000
MILLION: Final = 1_000_000


class Turns:
    """Asks the application, and measures the longest turn of the loop meanwhile; commits are made in a thread."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.longest_s = 0.0

    @property
    def now_ms(self) -> int:
        """By the broker's clock."""
        return self._client.rig.now_ms

    def ask(self, method: str, path: str, body: bytes = b"", content_type: bytes = JSON) -> Reply:
        gc.collect()
        gc.freeze()  # what the test made before is no part of a turn; a broker does so at its start
        return asyncio.run(self._ask(method, path, body, content_type))

    async def _ask(self, method: str, path: str, body: bytes, content_type: bytes) -> Reply:
        scope = make_scope(method, path)
        if method == "POST":
            scope["headers"].append((b"content-type", content_type))
            scope["headers"].append((b"content-length", str(len(body)).encode()))
        wire, rig = Wire([body]), self._client.rig
        task = asyncio.ensure_future(wire.serve(self._client.app, scope))
        commits = asyncio.ensure_future(self._commit(task))
        while not task.done():
            began_s = time.thread_time()
            await asyncio.sleep(0)
            rig.run_posted()
            self.longest_s = max(self.longest_s, time.thread_time() - began_s)
        await commits
        await task
        return wire.reply()

    async def _commit(self, until: asyncio.Future[None]) -> None:
        while not until.done():
            await asyncio.to_thread(self._client.rig.broker.writer.step, wait_s=0.01)


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    """What these tests kept from the collector; once, for it looks through all tests of the house."""
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture
def turns(rig: Rig) -> Turns:
    return Turns(Client(rig))


def send_of(body: bytes) -> bytes:
    return b'{"messages":[{"subject":"orders","body":%b}]}' % body


HALF: Final = 999_000
HOSTILE_JSON: Final[dict[str, bytes]] = {
    "deep": b"[" * HALF + b"]" * HALF,
    "never closed": b'{"a":' * 400_000,
    "a wide list": b"[" + b"[]," * 660_000 + b"0]",
    "wide objects": b"[" + b'{"a":1},' * 240_000 + b"0]",
    "shallow nests": b"[" + (b"[" * 60 + b"]" * 60 + b",") * 16_000 + b"0]",
    "numbers": b"[" + b"1," * 990_000 + b"0]",
    "texts": b"[" + b'"",' * 660_000 + b"0]",
    "escapes": b'"' + b'\\"' * 990_000 + b'"',
    "surrogates": b'"' + b"\\ud83d\\ude00" * 160_000 + b'"',
    "names": b"{" + b",".join(b'"%d":1' % number for number in range(170_000)) + b"}",
    "bytes that are no text": b'"' + b"\xff" * 2_000_000 + b'"',
}


@pytest.mark.parametrize("kind", HOSTILE_JSON)
def test_B10_hostile_json_holds_up_no_other(turns: Turns, kind: str) -> None:
    reply = turns.ask("POST", "/v1/send", send_of(HOSTILE_JSON[kind]))
    assert reply.status in (200, 400, 422), reply.body
    assert turns.longest_s < TURN_S_MAX


def test_B10_many_messages_in_json_hold_up_no_other(turns: Turns) -> None:
    body = json.dumps({"messages": [{"subject": SUBJECT, "body": 1}] * MANY}).encode()
    assert turns.ask("POST", "/v1/send", body).status == 200
    pull = {"subject": SUBJECT, "group": "g", "consumer": "c", "max_messages": MANY}
    reply = turns.ask("POST", "/v1/pull", json.dumps(pull).encode())
    given = reply.json
    assert len(given["messages"]) == MANY
    acks = [[number, number + 1] for number in range(0, MANY, 2)]
    settlement = {"token": given["token"], "acks": acks}
    settle = {"subject": SUBJECT, "group": "g", "consumer": "c", "settlements": [settlement]}
    assert turns.ask("POST", "/v1/settle", json.dumps(settle).encode()).status == 200
    assert turns.longest_s < TURN_S_MAX


def test_B10_many_messages_in_frames_hold_up_no_other(turns: Turns) -> None:
    frame = make_frame([b"x"] * MANY)
    assert turns.ask("POST", "/v1/send", frame, FRAME).status == 200
    for group in ("a", "b"):
        request = PullRequest(subject=SUBJECT, group=group, consumer="c", max_messages=MANY)
        assert turns.ask("POST", "/v1/pull", encode_control(request), FRAME).status == 200
    assert turns.longest_s < TURN_S_MAX


def test_B10_many_expired_messages_hold_up_no_other(rig: Rig, turns: Turns) -> None:
    for _ in range(5):
        rig.submit(make_frame([b"x"] * MANY, expires_at_ms=1))
    rig.broker.writer.step()
    rig.run_posted()
    pull = {"subject": SUBJECT, "group": "g", "consumer": "c", "max_messages": MANY}
    for _ in range(20):
        assert turns.ask("POST", "/v1/pull", json.dumps(pull).encode()).status == 200
    state = rig.broker.delivery.group(SUBJECT, "g")
    assert state is not None
    assert len(state.dead) > MANY // 4
    assert turns.longest_s < TURN_S_MAX


def fill(rig: Rig, fields: Callable[[int], dict[str, Any]]) -> None:
    """Store three frames of messages with these fields, by number."""
    ids = new_ids()
    for first in range(0, 3 * MANY, MANY):
        records = [
            Record(message_id=next(ids), subject=SUBJECT, body=b"x", born_at_ms=1, **fields(number))
            for number in range(first, first + MANY)
        ]
        rig.submit(build_message_frame({SUBJECT: [encode_record(one) for one in records]}))
    rig.broker.writer.step()
    rig.run_posted()


@pytest.mark.parametrize("tags_of_all", [1, 3 * MANY], ids=["alike", "of their own"])
@pytest.mark.parametrize("wanted", [1, 64])
def test_B10_a_backlog_that_no_tag_matches_holds_up_no_other(
    rig: Rig, turns: Turns, wanted: int, tags_of_all: int
) -> None:
    fill(rig, lambda number: {"tags": (f"t{number % tags_of_all}",)})
    tags = Tags(any=tuple(f"w{number}" for number in range(wanted)))
    request = PullRequest(subject=SUBJECT, group="g", consumer="c", max_messages=100, tags=tags)
    for _ in range(5):
        assert turns.ask("POST", "/v1/pull", encode_control(request), FRAME).status == 200
    state = rig.broker.delivery.group(SUBJECT, "g")
    assert state is not None
    assert state.cursor > 2_000
    assert turns.longest_s < TURN_S_MAX


@pytest.mark.parametrize("outcome", ["acks", "nacks", "rejects", "extends"])
def test_B10_settling_many_messages_one_by_one_holds_up_no_other(
    rig: Rig, turns: Turns, outcome: str
) -> None:
    rig.submit(make_frame([b"x"] * MANY))
    rig.broker.writer.step()
    rig.run_posted()
    given = rig.pull(max_messages=MANY, consumer="c")
    more: dict[str, dict[str, Any]] = {
        "nacks": {"error": "e" * 40},
        "rejects": {"reason": "r" * 40},
        "extends": {"lease_ms": 9_000},
    }
    parts = [list(given.part(index)) for index in range(MANY)]
    ranges: list[Any] = (
        parts if outcome == "acks" else [{"range": part, **more[outcome]} for part in parts]
    )
    settlement = {"token": given.token, outcome: ranges}
    settle = {"subject": SUBJECT, "group": "billing", "consumer": "c", "settlements": [settlement]}
    reply = turns.ask("POST", "/v1/settle", json.dumps(settle).encode())
    assert reply.json["settled"] == MANY
    assert turns.longest_s < TURN_S_MAX


def test_B10_messages_that_come_back_one_by_one_hold_up_no_other(rig: Rig, turns: Turns) -> None:
    """Each is a run of its own; a pull gets some hundred, and new messages get their share."""
    rig.submit(make_frame([b"x"] * MANY))
    rig.broker.writer.step()
    rig.run_posted()
    given = rig.pull(max_messages=MANY, consumer="c")
    nacks = [{"range": given.part(n), "delay_ms": 0, "error": f"{n}"} for n in range(MANY)]
    names = {"subject": SUBJECT, "group": "billing", "consumer": "c"}
    settle = {**names, "settlements": [{"token": given.token, "nacks": nacks}]}
    assert turns.ask("POST", "/v1/settle", json.dumps(settle).encode()).status == 200
    rig.submit(make_frame([b"new"] * MANY))
    rig.broker.writer.step()
    rig.run_posted()
    for _ in range(2):
        pull = json.dumps({**names, "max_messages": MANY}).encode()
        found = turns.ask("POST", "/v1/pull", pull).json
        attempts = [one["attempt"] for one in found["messages"]]
        assert attempts.count(2) > 2 * attempts.count(1) > 0
        first = found["messages"][0]["pull_sequence"]
        acks = [[first, first + len(attempts)]]
        settle = {**names, "settlements": [{"token": found["token"], "acks": acks}]}
        assert turns.ask("POST", "/v1/settle", json.dumps(settle).encode()).status == 200
    assert turns.longest_s < TURN_S_MAX


def subjects(rig: Rig) -> None:
    for first in range(0, MANY, 1_000):
        names = [f"s{number}" for number in range(first, first + 1_000)]
        for name in names:
            rig.submit(make_frame([b"x"], subject=name))
        rig.broker.writer.step()
        rig.run_posted()


def groups(rig: Rig) -> None:
    rig.send(b"x")
    for number in range(5_000):
        rig.pull(group=f"g{number}")


def dead_letters(rig: Rig) -> None:
    rig.submit(make_frame([b"x"] * MANY, expires_at_ms=1))
    rig.broker.writer.step()
    rig.run_posted()
    for _ in range(20):
        rig.pull(max_messages=MANY)


Prepare = Callable[[Rig], None]
LISTS: Final[dict[str, tuple[Prepare, str]]] = {
    "subjects": (subjects, "/v1/subjects"),
    "groups": (groups, "/v1/groups"),
    "metrics of subjects": (subjects, "/metrics"),
    "metrics of groups": (groups, "/metrics"),
    "ready with groups": (groups, "/readyz"),
    "dead letters": (
        dead_letters,
        "/v1/dead?subject=orders&group=billing&messages=1&count=1000",
    ),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Prepare], Rig]]:
    """A broker that was prepared so; looking at it changes nothing."""
    made: dict[Prepare, Rig] = {}

    def rig_of(prepare: Prepare) -> Rig:
        if prepare not in made:
            made[prepare] = Rig(tmp_path_factory.mktemp("prepared") / "data")
            prepare(made[prepare])
        return made[prepare]

    yield rig_of
    for rig in made.values():
        rig.close()


@pytest.mark.parametrize("kind", LISTS)
def test_B10_long_lists_hold_up_no_other(prepared: Callable[[Prepare], Rig], kind: str) -> None:
    prepare, path = LISTS[kind]
    turns = Turns(Client(prepared(prepare)))
    assert turns.ask("GET", path).status == 200
    assert turns.longest_s < TURN_S_MAX


@pytest.mark.parametrize("what", ["replay", "purge"])
def test_B10_dealing_with_all_dead_letters_holds_up_no_other(
    rig: Rig, turns: Turns, what: str
) -> None:
    dead_letters(rig)
    body: dict[str, Any] = {"subject": SUBJECT, "group": "billing"}
    reply = turns.ask("POST", f"/v1/dead/{what}", json.dumps(body).encode())
    assert reply.status == 200
    assert turns.longest_s < TURN_S_MAX


#: Requests about dead letters; only the last of each list changes any.
OF_LETTERS: Final[dict[str, list[tuple[str, str, dict[str, Any]]]]] = {
    "list and replay": [
        ("GET", "/v1/dead?subject=orders&group=billing&count=1000", {}),
        ("GET", "/v1/dead?subject=orders&group=billing&count=1000&first=900000", {}),
        ("POST", "/v1/dead/replay", {"first": 1}),
    ],
    "seek to the beginning": [("POST", "/v1/groups/seek", {"to": "earliest"})],
    "seek to the middle": [("POST", "/v1/groups/seek", {"to": "sequence:500000"})],
    "remove": [("POST", "/v1/groups/remove", {})],
}


class Written(NamedTuple):
    """A page of dead letters as a snapshot has it."""

    content: bytes

    def read(self) -> bytes:
        return self.content


@pytest.fixture(scope="module")
def million() -> list[Written]:
    """So many dead letters, block by block: one by one they take seconds in every test."""
    letter = DeadLetter(
        sequence=0, attempts=1, reason=REJECTED, error="no", at_ms=FakeClock().now_ms()
    )
    pages = []
    for first in range(0, MILLION, BLOCK_LETTERS_MAX):
        sequences = range(first, min(first + BLOCK_LETTERS_MAX, MILLION))
        letters = [msgspec.structs.replace(letter, sequence=sequence) for sequence in sequences]
        pages.append(Written(msgspec.msgpack.encode(letters)))
    return pages


@pytest.mark.parametrize("asked", OF_LETTERS)
def test_B10_a_million_dead_letters_hold_up_no_other(
    rig: Rig, turns: Turns, asked: str, million: list[Written]
) -> None:
    rig.send(b"x")
    rig.pull()
    state = rig.broker.delivery.group(SUBJECT, "billing")
    assert state is not None
    for page in million:
        state.dead.add(page, is_kept=False)
    del state  # or nothing of it is freed in a turn
    for method, path, more in OF_LETTERS[asked]:
        assert [len(one.dead) for one in rig.broker.delivery.groups()] == [MILLION]
        body = json.dumps({"subject": SUBJECT, "group": "billing", **more}).encode()
        turns.longest_s = 0.0
        reply = turns.ask(method, path, body if method == "POST" else b"")
        assert reply.status == 200, reply.body
        assert turns.longest_s < TURN_OF_LETTERS_S_MAX, (path, more)
        began_s = time.thread_time()
        rig.broker.delivery.snapshot(rig.now_ms)
        assert time.thread_time() - began_s < TURN_S_MAX


@pytest.mark.parametrize("keys", [1, 50, MANY], ids=lambda keys: f"{keys} keys")
def test_B10_an_ordered_group_of_many_messages_holds_up_no_other(
    rig: Rig, turns: Turns, keys: int
) -> None:
    """With few keys, most messages are reached and wait; with many, all are given out."""
    fill(rig, lambda number: {"key": f"k{number % keys}"})
    names = {"subject": SUBJECT, "group": "g", "consumer": "c"}
    pull = {**names, "max_messages": MANY, "ordered": True}
    for outcome in ("acks", "nacks", "acks"):
        given = turns.ask("POST", "/v1/pull", json.dumps(pull).encode()).json
        assert given["messages"]
        places = [[one["pull_sequence"], one["pull_sequence"] + 1] for one in given["messages"]]
        ranges = places if outcome == "acks" else [{"range": one, "delay_ms": 0} for one in places]
        settlement = {"token": given["token"], outcome: ranges}
        settle = {**names, "settlements": [settlement]}
        assert turns.ask("POST", "/v1/settle", json.dumps(settle).encode()).status == 200
    assert turns.longest_s < TURN_S_MAX


@pytest.fixture
def indexed(rig: Rig) -> str:
    """Many messages with one key, all of which were given back; the id of one of them."""
    rig.submit(make_frame([b"x" * 100] * MANY, key="one"))
    rig.broker.writer.step()
    rig.run_posted()
    given = rig.pull(max_messages=MANY, consumer="c")
    errors = tuple(
        Nack(range=given.part(index), delay_ms=60_000, error="e" * 40) for index in range(MANY)
    )
    rig.settle(Settlement(token=given.token, nacks=errors), "c")
    rig.store.step()
    return format_message_id(record_message_id(given.records[0]))


@pytest.mark.parametrize(
    "path",
    [
        "/v1/messages?subject=orders&key=one&count=1000",
        "/v1/messages?subject=orders&key=none&count=1000",
        "/v1/messages?id={id}",
        "/v1/messages/{id}/trace",
    ],
    ids=["a key of all", "a key of none", "an id", "a trace"],
)
def test_B10_searches_hold_up_no_other(turns: Turns, indexed: str, path: str) -> None:
    reply = turns.ask("GET", path.format(id=indexed))
    assert reply.status == 200, reply.body
    assert turns.longest_s < TURN_S_MAX


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[tuple[Turns, list[str]]]:
    """Many delayed messages, and the ids of some of them."""
    rig = DelayRig(tmp_path / "data")
    ids = new_ids(77)
    first_ms = rig.now_ms + HOUR_MS
    for first in range(0, 3 * MANY, MANY):
        rig.submit(
            build_message_frame(
                {
                    SUBJECT: [
                        encode_record(
                            Record(
                                message_id=next(ids),
                                subject=SUBJECT,
                                body=b"x",
                                born_at_ms=1,
                                due_at_ms=first_ms + 10 * number,
                            )
                        )
                        for number in range(first, first + MANY)
                    ]
                },
                kind=FrameKind.DELAYED,
            )
        )
        rig.commit()
    again = new_ids(77)
    yield Turns(Client(rig)), [format_message_id(next(again)) for _ in range(100)]
    rig.close()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/delayed?count=1000",
        "/v1/delayed?subject=orders&count=1000",
        "/v1/delayed/histogram?span=second",
        "/v1/delayed/status",
        "/v1/delayed/{id}",
        "/v1/subjects",
    ],
)
def test_B10_lists_of_delayed_messages_hold_up_no_other(
    waiting: tuple[Turns, list[str]], path: str
) -> None:
    turns, ids = waiting
    assert turns.ask("GET", path.format(id=ids[0])).status == 200
    assert turns.longest_s < TURN_S_MAX


def test_B10_cancelling_and_rescheduling_many_messages_holds_up_no_other(
    waiting: tuple[Turns, list[str]],
) -> None:
    turns, ids = waiting
    for one in ids[:10]:
        later = {"message_id": one, "deliver_at_ms": turns.now_ms + 2 * HOUR_MS}
        reply = turns.ask("POST", "/v1/delayed/reschedule", json.dumps(later).encode())
        assert reply.json["outcomes"] == ["rescheduled"]
    bodies: list[dict[str, Any]] = [
        {"message_ids": ids},
        {"message_ids": ids, "subject": SUBJECT, "withdrawn": True},
        {"message_ids": [f"{number:032x}" for number in range(1, 101)]},
    ]
    for body in bodies:
        reply = turns.ask("POST", "/v1/delayed/cancel", json.dumps(body).encode())
        assert reply.status == 200, reply.body
    assert turns.longest_s < TURN_S_MAX
