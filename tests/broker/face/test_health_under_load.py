"""B10: a real broker answers a health check beside whatever else is asked of it.

Measured is the processor time of the whole broker while a check waits for its answer: how long it waits for a
processor, on a busy machine, does not count.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from qmq_client.wire.requests import FRAME_CONTENT_TYPE
from tests.broker.face.test_loop_latency import HOSTILE_JSON, MANY, send_of
from tests.broker.service.rig import make_frame
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S

#: Ten turns of the loop, as long as one may be: of all threads, some of which work beside it.
CHECK_S_MAX: Final = 0.5
PAUSE_S: Final = 0.005
NAMES: Final = {"subject": "many", "group": "g", "consumer": "c"}


def processor_s(pid: int) -> float:
    """What all threads of a process have used so far."""
    used_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            used_ns += int((task / "schedstat").read_text().split()[0])
        except OSError:  # it has ended
            continue
    return used_ns / 1e9


class Checks:
    """Health checks one after the other, on a connection of their own."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker
        self._is_over = threading.Event()
        #: Processor time of each.
        self.taken_s: list[float] = []

    def run(self) -> None:
        connection = http.client.HTTPConnection(
            self._broker.host, self._broker.port, timeout=DEADLINE_S
        )
        while not self._is_over.wait(PAUSE_S):
            before_s = processor_s(self._broker.pid)
            connection.request("GET", "/healthz")
            assert connection.getresponse().read()
            self.taken_s.append(processor_s(self._broker.pid) - before_s)
        connection.close()

    @contextmanager
    def beside(self) -> Iterator[None]:
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("beside") / "data") as running:
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="module")
def client(broker: BrokerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=broker.url, timeout=DEADLINE_S) as made:
        yield made


def post(client: httpx.Client, path: str, body: object) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def get(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text


def messages_in_json(client: httpx.Client) -> None:
    post(client, "/v1/send", {"messages": [{"subject": "many", "body": 1, "key": "k"}] * MANY})
    get(client, "/v1/messages?subject=many&key=k&count=1000")


def messages_in_frames(client: httpx.Client) -> None:
    frame, content = make_frame([b"x"] * MANY, subject="many"), {"content-type": FRAME_CONTENT_TYPE}
    sent = client.post("/v1/send", content=frame, headers=content)
    assert sent.status_code == 200


def outcomes_one_by_one(client: httpx.Client) -> None:
    messages_in_frames(client)
    for outcome in ("nacks", "rejects"):
        given = post(client, "/v1/pull", {**NAMES, "max_messages": MANY})
        places = [one["pull_sequence"] for one in given["messages"]]
        more = {"delay_ms": 0} if outcome == "nacks" else {}
        ranges = [{"range": [one, one + 1], **more} for one in places]
        settlement = {"token": given["token"], outcome: ranges}
        post(client, "/v1/settle", {**NAMES, "settlements": [settlement]})
    get(client, "/v1/dead?subject=many&group=g&count=1000&messages=1")
    post(client, "/v1/dead/replay", {"subject": "many", "group": "g"})


def delayed_messages(client: httpx.Client) -> None:
    messages = [{"subject": "later", "body": 1, "delay_ms": 3_600_000 + n} for n in range(MANY)]
    ids = post(client, "/v1/send", {"messages": messages})["message_ids"]
    get(client, "/v1/delayed?count=1000")
    get(client, "/v1/delayed/histogram?span=second")
    for first in range(0, 500, 100):
        post(client, "/v1/delayed/cancel", {"message_ids": ids[first : first + 100]})


def subjects_and_groups(client: httpx.Client) -> None:
    for first in range(0, 4_000, 1_000):
        messages = [{"subject": f"s{n}", "body": 1} for n in range(first, first + 1_000)]
        post(client, "/v1/send", {"messages": messages})
    for number in range(200):
        post(client, "/v1/pull", {**NAMES, "group": f"g{number}", "max_messages": 1})
    for path in ("/v1/subjects", "/v1/groups", "/metrics", "/readyz", "/v1/room"):
        get(client, path)


CASES: Final[dict[str, Callable[[httpx.Client], None]]] = {
    "messages in JSON": messages_in_json,
    "messages in frames": messages_in_frames,
    "outcomes one by one": outcomes_one_by_one,
    "delayed messages": delayed_messages,
    "subjects and groups": subjects_and_groups,
}


def assert_answered(checks: Checks) -> None:
    assert checks.taken_s, "none was answered"
    assert max(checks.taken_s) < CHECK_S_MAX


@pytest.mark.parametrize("kind", CASES)
def test_B10_health_is_answered_during_large_requests(
    broker: BrokerProcess, client: httpx.Client, kind: str
) -> None:
    checks = Checks(broker)
    with checks.beside():
        CASES[kind](client)
    assert_answered(checks)


def test_B10_health_is_answered_during_hostile_json(
    broker: BrokerProcess, client: httpx.Client
) -> None:
    checks = Checks(broker)
    with checks.beside():
        for body in HOSTILE_JSON.values():
            content = {"content-type": "application/json"}
            answer = client.post("/v1/send", content=send_of(body), headers=content)
            assert answer.status_code in (200, 400, 422), answer.text
    assert_answered(checks)
