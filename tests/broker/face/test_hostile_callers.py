"""Hostile callers of a broker with tokens: what they send ends nothing, shows nowhere, and costs nobody else.

The list of what is tried is numbered by what it attacks; the fuzz is seeded, so that what fails once
fails again. With `--release` it is longer.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.broker.face.guard import add_token
from tests.kit.broker_process import SERVE_WITH_FAULTS, BrokerProcess, read_all
from tests.kit.waiting import DEADLINE_S, wait_for

#: Words that must be in no line of the log.
BODY, KEY, HEADER = "canary-body-3141", "canary-key-2718", "canary-header-1618"
STRANGER = "qmq_0123456789abcdef_" + "ca7a12" * 10 + "5555"
#: A line of the log: time, level, logger, event, fields.
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ [\w.]+ \w+( [\w.]+=\S.*)*\n\Z")
EVIL_NAMES = [
    "..", "../../etc/passwd", "%2e%2e%2f", "a/b", "a\\b", "a\0b", "a\r\nb", "a\n", " a", "a ", ".hidden",
    "-rf", "CON:", "a" * 128, "é", "e\u0301", "😀", "\u202egpj", "\x1b[31mred", "$(id)", "';--",
]  # fmt: skip
FUZZED = 700
#: Threads of the broker's pool, which are made as chance asks for them; a leak makes hundreds.
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
FUZZED_FOR_RELEASE = 50_000


class Guarded:
    """A guarded broker and the tokens of its callers."""

    def __init__(self, broker: BrokerProcess, producer: str, consumer: str) -> None:
        self.broker = broker
        self.tokens = {"producer": producer, "consumer": consumer}

    def headers(self, caller: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.tokens[caller]}"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("hostile")
    tokens = folder / "tokens.json"
    producer, consumer = add_token(tokens, "producer")[1], add_token(tokens, "consumer")[1]
    with BrokerProcess(folder / "data", "--tokens", str(tokens)) as broker:
        yield Guarded(broker, producer, consumer)
        assert broker.stop() == 0
        assert "Traceback" not in broker.log
        assert " request_failed " not in broker.log
        assert [line for line in broker.lines if not LINE.match(line)] == []
        secrets = [BODY, KEY, HEADER, STRANGER, producer, consumer]
        assert [secret for secret in secrets if secret in broker.log] == []


@pytest.mark.parametrize("name", EVIL_NAMES)
@pytest.mark.parametrize("field", ["subject", "group", "consumer"])
def test_a_name_that_is_none_reaches_no_file_and_is_refused_by_field(
    guarded: Guarded, field: str, name: str
) -> None:
    pull = {"subject": "a", "group": "b", "consumer": "c", field: name}
    with httpx.Client(base_url=guarded.broker.url, timeout=DEADLINE_S) as client:
        reply = client.post("/v1/pull", json=pull, headers=guarded.headers("consumer"))
        assert (reply.status_code, reply.json()["field"]) == (422, field)
        if field == "subject":
            send = {"messages": [{"subject": name, "body": BODY}]}
            reply = client.post("/v1/send", json=send, headers=guarded.headers("producer"))
            assert (reply.status_code, reply.json()["field"]) == (422, field)
        if field != "consumer":
            ask = {"subject": "a", "group": "b", field: name}
            reply = client.get("/v1/dead", params=ask, headers=guarded.headers("consumer"))
            assert (reply.status_code, reply.json()["field"]) == (422, field)


def test_names_that_differ_only_in_case_are_two_subjects(guarded: Guarded) -> None:
    with httpx.Client(base_url=guarded.broker.url, timeout=DEADLINE_S) as client:
        for subject in ("Twin", "twin", "CON", "con"):
            send = {"messages": [{"subject": subject, "body": subject}]}
            reply = client.post("/v1/send", json=send, headers=guarded.headers("producer"))
            assert reply.json()["places"][0]["first_sequence"] == 0
            found = client.get(
                "/v1/messages", params={"subject": subject}, headers=guarded.headers("consumer")
            )
            assert [one["body"] for one in found.json()["messages"]] == [subject]


def test_what_callers_say_is_in_no_log(guarded: Guarded) -> None:
    message = {"subject": "a", "body": BODY, "key": KEY, "headers": {"x": HEADER}}
    with httpx.Client(base_url=guarded.broker.url, timeout=DEADLINE_S) as client:
        as_producer = guarded.headers("producer")
        for sent in (message, {**message, "message_id": "no id " + BODY}, {**message, "tags": [1]}):
            client.post("/v1/send", json={"messages": [sent]}, headers=as_producer)
        client.post("/v1/send", content=BODY, headers=as_producer)
        client.post("/v1/send", json=message, headers={"authorization": f"Bearer {STRANGER}"})
        client.get("/v1/messages", params={"id": BODY, "token": STRANGER}, headers=as_producer)
        pull = {"subject": "a", "group": "b", "consumer": "c"}
        taken = client.post("/v1/pull", json=pull, headers=guarded.headers("consumer")).json()
        nack = {"range": [0, 1], "error": BODY}
        settle = {**pull, "settlements": [{"token": taken["token"], "nacks": [nack]}]}
        assert client.post(
            "/v1/settle", json=settle, headers=guarded.headers("consumer")
        ).is_success
    guarded.broker.talk(f"GET /{BODY}%0aERROR%20fake HTTP/1.1\r\nHost: \x1b[31m\r\n\r\n".encode())
    guarded.broker.talk(f"BREW {BODY} HTTP/1.1\r\n\r\n".encode())


@pytest.mark.parametrize(
    "path",
    ["/v1/caller?token={0}", "/v1/caller?access_token={0}", "/v1/caller#{0}", "/{0}/v1/caller"],
)
def test_a_token_counts_in_its_header_and_nowhere_else(guarded: Guarded, path: str) -> None:
    token = guarded.tokens["producer"]
    reply = httpx.get(
        guarded.broker.url + path.format(token), cookies={"token": token}, timeout=DEADLINE_S
    )
    assert reply.status_code == 401
    basic = httpx.get(f"{guarded.broker.url}/v1/caller", auth=("token", token), timeout=DEADLINE_S)
    assert basic.status_code == 401


def test_two_tokens_in_one_request_are_ambiguous(guarded: Guarded) -> None:
    lines = "".join(f"Authorization: Bearer {token}\r\n" for token in guarded.tokens.values())
    answer = guarded.broker.talk(f"GET /v1/caller HTTP/1.1\r\nHost: a\r\n{lines}\r\n".encode())
    assert b"HTTP/1.1 400" in answer
    assert b"authorization is given twice" in answer


def test_a_stranger_is_refused_before_the_body_is_read_and_cannot_fill_the_room(
    guarded: Guarded,
) -> None:
    head = b"POST /v1/send HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    with guarded.broker.connection() as connection:
        connection.sendall(head + b"Content-Length: 8000000\r\n\r\n" + b"x" * 1000)
        answer = connection.recv(65_536)
    assert b"HTTP/1.1 401" in answer


def test_a_request_behind_a_refused_one_is_its_own(guarded: Guarded) -> None:
    """What a refused body looks like is never taken for a request."""
    token = guarded.tokens["consumer"]
    hidden = f"GET /v1/caller HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {token}\r\n\r\n"
    head = "POST /v1/send HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(hidden)}\r\n\r\n{hidden}"
    last = "GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    with guarded.broker.connection() as connection:
        connection.sendall((request + last).encode())
        answer = read_all(connection)
    assert re.findall(rb"HTTP/1.1 (\d{3})", answer) == [b"401", b"200"]


def test_B10_one_address_cannot_take_all_connections(tmp_path: Path) -> None:
    more = ("--connections", "5", "--connections-per-address", "2")
    with (
        BrokerProcess(tmp_path / "data", *more, command=SERVE_WITH_FAULTS) as broker,
        broker.connection() as one,
        broker.connection() as two,
        broker.connection() as surplus,
    ):
        assert b"HTTP/1.1 503" in read_all(surplus)
        for connection in (one, two):
            assert b"HTTP/1.1 408" in read_all(connection)
        assert httpx.get(f"{broker.url}/healthz", timeout=DEADLINE_S).status_code == 200, (
            "they are given back"
        )


def requests(guarded: Guarded) -> list[bytes]:
    """Good requests to be spoilt: every route, known callers and strangers."""
    bodies: list[tuple[str, object]] = [
        ("/v1/send", {"messages": [{"subject": "a", "body": {"b": [1, None]}, "key": "k"}]}),
        ("/v1/pull", {"subject": "a", "group": "b", "consumer": "c", "max_messages": 3}),
        ("/v1/settle", {"subject": "a", "group": "b", "consumer": "c", "settlements": []}),
        ("/v1/groups/seek", {"subject": "a", "group": "b", "to": "latest"}),
        ("/v1/dead/replay", {"subject": "a", "group": "b"}),
        ("/v1/state", {"state": "serving"}),
    ]
    paths = [
        "/v1/messages?subject=a&key=k",
        "/v1/dead?subject=a&group=b",
        "/v1/files",
        "/openapi.json",
    ]
    made = []
    for token in (*guarded.tokens.values(), STRANGER):
        auth = f"Host: a\r\nAuthorization: Bearer {token}\r\n"
        made += [f"GET {path} HTTP/1.1\r\n{auth}\r\n".encode() for path in paths]
        for path, value in bodies:
            body = json.dumps(value)
            head = f"POST {path} HTTP/1.1\r\n{auth}Content-Type: application/json\r\n"
            made.append(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            chunked = (
                f"{head}Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n{body}\r\n0\r\n\r\n"
            )
            made.append(chunked.encode())
    return made


SPLICES = [
    b"\r\n", b"\n", b"\0", b"\r\n\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"%00", b"\xff",
    b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"Upgrade: h2c\r\n", b"{", b"[" * 300, b"\"", b"-1",
    b"9" * 30, b"Accept: application/vnd.qmq.frame\r\n", b"Content-Encoding: gzip\r\n", b"HTTP/1.0", b": ", b"QMQF",
]  # fmt: skip


def spoil(chance: random.Random, good: list[bytes]) -> bytes:
    """One or some requests with bytes changed, taken out, put in, or cut off."""
    data = bytearray(b"".join(chance.choices(good, k=chance.randint(1, 3))))
    for _ in range(chance.randint(0, 6)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                data[at : at + chance.randint(1, 40)] = b""
            case 2:
                data[at:at] = chance.choice(SPLICES)
            case _:
                other = chance.choice(good)
                data[at:at] = other[chance.randrange(len(other)) :][: chance.randint(1, 60)]
    return bytes(data[: chance.randint(0, len(data))] if chance.random() < 0.2 else data)


def open_files(broker: BrokerProcess) -> int:
    return len(os.listdir(f"/proc/{broker._process.pid}/fd"))


def resources(broker: BrokerProcess) -> dict[str, int]:
    """Open files, threads, and memory in KiB."""
    status = Path(f"/proc/{broker._process.pid}/status").read_text()
    found = dict(re.findall(r"^(Threads|VmRSS):\s+(\d+)", status, re.MULTILINE))
    return {
        "files": open_files(broker),
        "threads": int(found["Threads"]),
        "memory": int(found["VmRSS"]),
    }


def test_X_25_descriptors_threads_and_memory_stay_as_they_are(guarded: Guarded) -> None:
    good = requests(guarded)
    chance = random.Random(25)

    def ask(times: int) -> None:
        for _ in range(times):
            for data in good:
                guarded.broker.talk(data[: chance.randrange(len(data))])  # hung up in its middle
                guarded.broker.talk(data)

    ask(80)  # with Python 3.14 memory grows that long before it stays
    before = resources(guarded.broker)
    ask(80)
    wait_for(
        lambda: (
            resources(guarded.broker)["files"] <= before["files"] + 2
            and resources(guarded.broker)["threads"] <= before["threads"] + POOL_THREADS
        ),
        lambda: (before, resources(guarded.broker)),
    )
    # A KiB for each request would be several times as much.
    assert resources(guarded.broker)["memory"] <= before["memory"] + 160 * len(good)


def test_spoilt_requests_end_nothing_and_leave_nothing_open(
    guarded: Guarded, request: pytest.FixtureRequest
) -> None:
    seed = 20_260_725
    chance = random.Random(seed)
    good = requests(guarded)
    for data in good:
        guarded.broker.talk(data)
    before = open_files(guarded.broker)
    seen: set[int] = set()
    is_release = request.config.getoption("--release")
    for number in range(FUZZED_FOR_RELEASE if is_release else FUZZED):
        data = spoil(chance, good)
        answer = guarded.broker.talk(data)
        statuses = {int(found) for found in re.findall(rb"HTTP/1\.[01] (\d{3}) ", answer)}
        seen |= statuses
        assert not any(300 <= status < 400 or status >= 500 for status in statuses), (
            f"seed {seed}, request {number}: {data!r} got {answer!r}"
        )
        assert b"Traceback" not in answer
    assert {200, 400, 401, 403} <= seen, "the fuzz reaches the routes"
    assert httpx.get(f"{guarded.broker.url}/healthz", timeout=DEADLINE_S).status_code == 200
    assert open_files(guarded.broker) <= before + 5
