"""A real broker process that is killed in each phase of a delayed message: each comes once, in its time."""

from __future__ import annotations

import json
import time
import urllib.request
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from qmq_client.errors import TransportError
from qmq_client.transport.http import HttpTransport
from tests.broker.delay.delay_rig import delayed_frame
from tests.broker.service.rig import SUBJECT, make_frame
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import wait_for

SERVE = ("-m", "tests.broker.delay.dying_serve")
MINUTE_MS = 60_000
#: When messages are due, after they were sent: now, and in three buckets.
DUE_MS = (1, 6 * MINUTE_MS, 11 * MINUTE_MS, 16 * MINUTE_MS)
#: How far the clock is in each life of the broker; the last is after all of them.
SHIFTS_MS = (0, 12 * MINUTE_MS, 40 * MINUTE_MS)
PER_MOMENT = 5

#: Phase → when it dies: before or after which call on which files, and at which of these calls.
DEATHS = {
    "copy, nothing written": "before:write:schedule/:1",
    "copy, one bucket of several": "after:write:schedule/:2",
    "copy, without its table": "before:rename:state/schedule:1",
    "copy, just done": "after:rename:state/schedule:2",
    "load": "before:read:schedule/:1",
    "release": "after:write:commitlog/:6",
    "dispatch": "before:write:dispatch/:1",
    "dispatch, without its table": "after:write:dispatch/:2",
    "cleaning, before": "before:unlink:schedule/:1",
    "cleaning, half of it": "after:unlink:schedule/:2",
    "cleaning, the last": "after:unlink:dispatch/:2",
}


def ask(broker: BrokerProcess, path: str) -> Any:
    with urllib.request.urlopen(f"{broker.url}{path}", timeout=60) as answer:
        return json.load(answer)


class Life:
    """One data directory, and what of it was acknowledged."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shift = directory / "shift"
        #: When each is due, of those that were acknowledged, and of all that were sent.
        self.due: dict[bytes, int] = {}
        self.sent: dict[bytes, int] = {}
        self.is_dead = False

    def live(self, shift_ms: int, die: str) -> None:
        """One life of the broker: messages are sent, what is due comes, files are cleaned."""
        self.shift.write_text(str(shift_ms))
        more = () if self.is_dead else ("--die", die)
        arguments = ("--shift", str(self.shift), *more)
        broker = BrokerProcess(self.directory / "data", *arguments, command=SERVE)
        try:
            broker.start()
            self._send(broker, shift_ms)
            wait_for(lambda: self._is_quiet(broker), "what is due")
            broker.stop()
        except (AssertionError, OSError, TransportError):
            if broker._process.wait(60) != -9 or self.is_dead:
                raise
        finally:
            self.is_dead = broker._process.poll() == -9 or self.is_dead
            broker.clean_up()

    def _send(self, broker: BrokerProcess, shift_ms: int) -> None:
        transport = HttpTransport(broker.url)
        try:
            for after_ms in DUE_MS:
                due_ms = time.time_ns() // 1_000_000 + shift_ms + after_ms
                due = {f"{shift_ms}.{after_ms}.{n}".encode(): due_ms for n in range(PER_MOMENT)}
                self.sent |= due
                transport.send(delayed_frame(due))
                self.due |= due
        finally:
            transport.close()

    def _is_quiet(self, broker: BrokerProcess) -> bool:
        """Whether what is to come is pending and nothing else, and what is done with is removed."""
        transport = HttpTransport(broker.url)
        transport.send(make_frame([b"tick"], subject="ticks"))  # the log's own time goes on
        transport.close()
        now_ms = time.time_ns() // 1_000_000 + int(self.shift.read_text())
        least, most = (sum(at > now_ms for at in due.values()) for due in (self.due, self.sent))
        pending = int(ask(broker, "/v1/delayed/status")["pending"])
        files = list((self.directory / "data").glob("schedule/*/*"))
        return least <= pending <= most and len(files) <= len(DUE_MS)

    def bodies(self) -> list[bytes]:
        """What came, by a broker that does not die."""
        arguments = ("--shift", str(self.shift))
        with BrokerProcess(self.directory / "data", *arguments, command=SERVE) as broker:
            wait_for(lambda: not ask(broker, "/v1/delayed/status")["pending"], "the rest")
            found = ask(broker, f"/v1/messages?subject={SUBJECT}&count=1000")["messages"]
            assert broker.stop() == 0
        return [b64decode(one["body_base64"]) for one in found]


@pytest.mark.parametrize("phase", DEATHS)
def test_D1_D3_a_broker_that_is_killed_in_each_phase_releases_every_message_once(
    tmp_path: Path, phase: str
) -> None:
    life = Life(tmp_path)
    for shift_ms in SHIFTS_MS:
        life.live(shift_ms, DEATHS[phase])
    assert life.is_dead, "it was never killed"
    life.shift.write_text(str(SHIFTS_MS[-1] + 90 * MINUTE_MS))
    came = life.bodies()
    assert len(came) == len(set(came))
    assert set(life.due) <= set(came) <= set(life.sent)
