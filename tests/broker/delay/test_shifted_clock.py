"""F35: the clock of a real broker process is set back and forward while messages wait."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

from qmq_client.transport.http import HttpTransport
from tests.broker.delay.delay_rig import delayed_frame
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import wait_for

SERVE_SHIFTED = ("-m", "tests.broker.delay.shifted_serve")
HOUR_MS = 3_600_000


def ask(broker: BrokerProcess, path: str) -> Any:
    with urllib.request.urlopen(f"{broker.url}{path}", timeout=60) as answer:
        return json.load(answer)


def post(broker: BrokerProcess, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{broker.url}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def stored(broker: BrokerProcess) -> int:
    subjects = ask(broker, "/v1/subjects")["subjects"]
    return sum(one["next_sequence"] for one in subjects)


def status(broker: BrokerProcess) -> dict[str, Any]:
    found: dict[str, Any] = ask(broker, "/v1/delayed/status")
    return found


def send(broker: BrokerProcess, *after_ms: int) -> None:
    now_ms = time.time_ns() // 1_000_000
    transport = HttpTransport(broker.url)
    due = {f"{after}.{n}".encode(): now_ms + after for n, after in enumerate(after_ms)}
    transport.send(delayed_frame(due))
    transport.close()


def test_F35_D1_D3_a_broker_whose_clock_is_set_back_and_forward_releases_nothing_early_or_twice(
    tmp_path: Path,
) -> None:
    shift = tmp_path / "shift"
    shift.write_text("0")
    arguments = ("--shift", str(shift))
    with BrokerProcess(tmp_path / "data", *arguments, command=SERVE_SHIFTED) as broker:
        send(broker, 1, 2_500, HOUR_MS // 2, 2 * HOUR_MS)
        wait_for(lambda: stored(broker) == 1, "the first message", within_s=30)
        shift.write_text(str(-HOUR_MS))
        wait_for(lambda: "set back" in status(broker)["clock"], "the alarm", within_s=30)
        send(broker, 3_000)
        time_ms = time.time_ns() // 1_000_000
        wait_for(lambda: time.time_ns() // 1_000_000 > time_ms + 4_000, "time", within_s=30)
        assert (stored(broker), status(broker)["pending"]) == (1, 4)
        shift.write_text("0")
        wait_for(lambda: stored(broker) == 3, "what was held", within_s=30)
        assert status(broker)["clock"] == ""
        shift.write_text(
            str(24 * HOUR_MS)
        )  # a day forward: a minute at once, then ten times as fast
        wait_for(lambda: "set forward" in status(broker)["clock"], "the alarm", within_s=30)
        assert (stored(broker), status(broker)["pending"]) == (3, 2)
        shift.write_text("0")
        broker.kill()
    with BrokerProcess(tmp_path / "data", *arguments, command=SERVE_SHIFTED) as broker:
        assert (stored(broker), status(broker)["pending"]) == (3, 2)
        assert broker.stop() == 0


def test_D3_what_was_given_back_for_hours_comes_back_to_a_broker_that_was_killed(
    tmp_path: Path,
) -> None:
    shift = tmp_path / "shift"
    shift.write_text("0")
    arguments = ("--shift", str(shift))
    whose = {"subject": "orders", "group": "billing", "consumer": "one"}
    with BrokerProcess(tmp_path / "data", *arguments, command=SERVE_SHIFTED) as broker:
        post(broker, "/v1/send", {"messages": [{"subject": "orders", "body": "a"}]})
        given = post(broker, "/v1/pull", {**whose, "wait_ms": 10_000})
        (message,) = given["messages"]
        place = [message["pull_sequence"], message["pull_sequence"] + 1]
        nack = {"range": place, "delay_ms": 3 * HOUR_MS, "error": "later"}
        settlement = {"token": given["token"], "nacks": [nack]}
        assert post(broker, "/v1/settle", {**whose, "settlements": [settlement]})["settled"] == 1
        groups = "/v1/groups?subject=orders"
        wait_for(
            lambda: ask(broker, groups)["groups"][0]["set_aside"] == 1, "set aside", within_s=30
        )
        (found,) = ask(broker, f"/v1/messages?id={message['message_id']}")["messages"]
        assert (found["groups"][0]["state"], found["groups"][0]["error"]) == ("waiting", "later")
        broker.kill()
    shift.write_text(str(4 * HOUR_MS))
    with BrokerProcess(tmp_path / "data", *arguments, command=SERVE_SHIFTED) as broker:
        wait_for(lambda: not status(broker)["pending"], "the release", within_s=30)
        (back,) = post(broker, "/v1/pull", {**whose, "wait_ms": 20_000})["messages"]
        assert (back["message_id"], back["attempt"]) == (message["message_id"], 2)
        assert [one["subject"] for one in ask(broker, "/v1/subjects")["subjects"]] == ["orders"]
        assert broker.stop() == 0
