"""F38: a broker is told to stop while it starts, at any moment of its recovery."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import httpx

from qmq_broker.face.exit_codes import ExitCode
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S

MESSAGES = 200
#: Lines of its log that a start has come to; nothing for at once.
MOMENTS = ("", " opened ", " listening ")


def send(url: str, count: int) -> None:
    messages = [{"subject": "orders", "body": "x" * 1_000} for _ in range(count)]
    httpx.post(f"{url}/v1/send", json={"messages": messages}, timeout=DEADLINE_S).raise_for_status()


def test_F38_B3_a_start_that_is_told_to_stop_leaves_what_it_found(tmp_path: Path) -> None:
    """Whoever is stopped before it listens for signals dies of them, which is a crash like any other."""
    data = tmp_path / "data"
    with BrokerProcess(data) as broker:
        send(broker.url, MESSAGES)
        broker.kill()
    was_clean = False
    for moment in MOMENTS:
        broker = BrokerProcess(data)
        broker.spawn()
        with ExitStack() as stack:
            stack.push(broker)  # its start is not waited for
            if moment:
                broker.wait_for(moment)
            code = broker.stop()
        assert code in (ExitCode.OK, -signal.SIGTERM), broker.log
        assert "Traceback" not in broker.log
        if "recovery.clean=" in broker.log:
            assert f"recovery.clean={was_clean}" in broker.log
        was_clean = code == ExitCode.OK
    with BrokerProcess(data) as broker:
        assert f"recovery.clean={was_clean}" in broker.log
        (subject,) = httpx.get(f"{broker.url}/v1/subjects", timeout=DEADLINE_S).json()["subjects"]
        assert (subject["first_sequence"], subject["next_sequence"]) == (0, MESSAGES)
