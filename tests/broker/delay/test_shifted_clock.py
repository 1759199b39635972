"""F35: the clock of a real broker process is set back and forward while messages wait."""

from __future__ import annotations

import json
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from qmq_client.commands.delayed import delayed
from qmq_client.transport.http import HttpTransport
from tests.broker.delay.delay_rig import delayed_frame
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import wait_for

SERVE_SHIFTED = ("-m", "tests.broker.delay.shifted_serve")
HOUR_MS = 3_600_000
#: How far ahead a message is sent that shall not be due before the clock is set.
_AHEAD_MS = (2_500, 10_000, 40_000)


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


def has_stored(broker: BrokerProcess, count: int) -> bool:
    return stored(broker) == count


def status(broker: BrokerProcess) -> dict[str, Any]:
    found: dict[str, Any] = ask(broker, "/v1/delayed/status")
    return found


def real_ms() -> int:
    """The machine's clock, which no file shifts."""
    return time.time_ns() // 1_000_000


def send(broker: BrokerProcess, *after_ms: int) -> None:
    now_ms = real_ms()
    transport = HttpTransport(broker.url)
    due = {f"{after}.{n}".encode(): now_ms + after for n, after in enumerate(after_ms)}
    transport.send(delayed_frame(due))
    transport.close()


def set_back_before_one_is_due(broker: BrokerProcess, shift: Path) -> tuple[int, int]:
    """Send a message and set the clock back by an hour before its time; when that is, and how many came.

    One that is due later is sent where the machine stood still for so long that the first has come.
    """
    for come, ahead_ms in enumerate(_AHEAD_MS, start=1):
        due_ms = real_ms() + ahead_ms
        send(broker, ahead_ms)
        shift.write_text(str(-HOUR_MS))
        if real_ms() < due_ms:
            return due_ms, come
        shift.write_text("0")
        wait_for(partial(has_stored, broker, come + 1), "what came too early")
    raise AssertionError(f"no {_AHEAD_MS[-1]} ms were enough")


def test_F35_D1_D3_a_broker_whose_clock_is_set_back_and_forward_releases_nothing_early_or_twice(
    tmp_path: Path,
) -> None:
    shift = tmp_path / "shift"
    shift.write_text("0")
    arguments = ("--shift", str(shift))
    with BrokerProcess(tmp_path / "data", *arguments, command=SERVE_SHIFTED) as broker:
        send(broker, 1, HOUR_MS // 2, 2 * HOUR_MS)
        wait_for(lambda: stored(broker) == 1, "the first message")
        due_ms, come = set_back_before_one_is_due(broker, shift)
        wait_for(lambda: "set back" in status(broker)["clock"], "the alarm")
        send(broker, 3_000)
        due_ms = max(due_ms, real_ms() + 3_000)
        wait_for(lambda: real_ms() > due_ms + 1_000, "time", within_s=50)
        assert (stored(broker), status(broker)["pending"]) == (come, 4)
        shift.write_text("0")
        wait_for(lambda: stored(broker) == come + 2, "what was held")
        assert status(broker)["clock"] == ""
        shift.write_text(
            str(24 * HOUR_MS)
        )  # a day forward: a minute at once, then ten times as fast
        wait_for(lambda: "set forward" in status(broker)["clock"], "the alarm")
        assert (stored(broker), status(broker)["pending"]) == (come + 2, 2)
        shift.write_text("0")
        broker.kill()
    with BrokerProcess(tmp_path / "data", *arguments, command=SERVE_SHIFTED) as broker:
        assert (stored(broker), status(broker)["pending"]) == (come + 2, 2)
        assert broker.stop() == 0


def test_D1_a_delay_is_counted_by_the_clock_as_it_is_and_a_command_accepts_a_changed_one(
    tmp_path: Path,
) -> None:
    def ran(broker: BrokerProcess, *arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(delayed, [*arguments, "--broker", broker.url])
        return result.exit_code, result.output

    shift = tmp_path / "shift"
    shift.write_text("0")
    arguments = ("--shift", str(shift))
    with BrokerProcess(tmp_path / "data", *arguments, command=SERVE_SHIFTED) as broker:
        send(broker, HOUR_MS, 3 * HOUR_MS)
        shift.write_text(str(-HOUR_MS))
        wait_for(lambda: "set back" in status(broker)["clock"], "the alarm")
        post(broker, "/v1/send", {"messages": [{"subject": "a", "body": 1, "delay_ms": 100}]})
        wait_for(lambda: stored(broker) == 1, "what was sent since")
        shift.write_text(str(2 * HOUR_MS))
        wait_for(lambda: "set forward" in status(broker)["clock"], "the alarm")
        assert (stored(broker), status(broker)["clock_held"]) == (1, 1)
        code, told = ran(broker, "accept-clock")
        assert (code, "held messages, at most: 1" in told) == (0, True)
        wait_for(lambda: stored(broker) == 2, "what was held")
        assert ran(broker, "accept-clock") == (0, "the clock was not changed\n")
        assert ran(broker, "status")[0] == 0
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
        wait_for(lambda: ask(broker, groups)["groups"][0]["long_retries"] == 1, "no long retry")
        (found,) = ask(broker, f"/v1/messages?id={message['message_id']}")["messages"]
        assert (found["groups"][0]["state"], found["groups"][0]["error"]) == ("waiting", "later")
        broker.kill()
    shift.write_text(str(4 * HOUR_MS))
    with BrokerProcess(tmp_path / "data", *arguments, command=SERVE_SHIFTED) as broker:
        wait_for(lambda: not status(broker)["pending"], "the release")
        (back,) = post(broker, "/v1/pull", {**whose, "wait_ms": 20_000})["messages"]
        assert (back["message_id"], back["attempt"]) == (message["message_id"], 2)
        assert [one["subject"] for one in ask(broker, "/v1/subjects")["subjects"]] == ["orders"]
        assert broker.stop() == 0
