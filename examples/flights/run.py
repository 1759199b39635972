"""The supervisor: starts every process of the demo, injects the faults, waits until all is calm.

What it is for is the story; how a process is started and killed is in `process.py`, what came out
is judged in `judge.py`.
"""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from examples.flights.database import read
from examples.flights.plan import (
    ABSENCE_S,
    BOARD,
    COUNTER,
    FAULTS,
    GROUPS,
    SUBJECTS,
    TALLIES,
    Plan,
)
from examples.flights.process import Child, ProcessError, wait_until
from examples.flights.proof import database_environment
from qmq_client.outbox.table import SENT
from tests.kit.events import Drained, Fault, Heal
from tests.kit.history import History

BROKER = "broker"
DEPARTURES = "departures"
WATCHDOG = "watchdog"
#: Ample for a busy machine that compiles everything first; a process that ends is told at once.
START_DEADLINE_S = 120.0
#: Flights per second below which the run counts as hanging; far below any machine's speed.
FLIGHTS_PER_S_MIN = 20
#: The broker is on this machine: no proxy of the environment is asked.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(slots=True)
class Figures:
    """What the supervisor itself saw."""

    started_s: float = 0.0
    #: From the first flight to the last commit.
    departures_s: float = 0.0
    #: From the first flight until every group had settled everything.
    total_s: float = 0.0
    faults: list[dict[str, Any]] = field(default_factory=list)
    #: What the broker's last life says of delayed messages.
    delayed: dict[str, Any] = field(default_factory=dict)


class Run:
    """One run of the demo. Use as a context manager: every process is gone afterwards."""

    def __init__(self, plan: Plan, flights: int, on_progress: Callable[[str, int], None]) -> None:
        self.plan = plan
        self.figures = Figures()
        self._flights = flights
        self._on_progress = on_progress
        self._history = History.open(plan.path("history"), "supervisor")
        self._faults = list(FAULTS)
        directory = plan.path("logs")
        directory.mkdir(exist_ok=True)
        listen = f"127.0.0.1:{plan.port}"
        data = str(plan.path("broker"))
        self.children = {
            BROKER: Child(
                BROKER,
                ["-m", "qmq_broker", "serve", "--data", data, "--listen", listen],
                directory,
            ),
            WATCHDOG: Child(
                WATCHDOG,
                ["-m", "qmq_client", "watchdog", "run", "--broker", plan.broker_url],
                directory,
                database_environment(plan),
            ),
        }
        for name in (TALLIES, COUNTER, DEPARTURES):
            service = ["-m", "examples.flights", name]
            self.children[name] = Child(name, service, directory, plan.to_environment())

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children.values():
            child.discard()
        self._history.close()

    def go(self) -> None:
        """From the start of the processes to the moment when nothing is left to do."""
        self._start_all()
        self.figures.started_s = time.monotonic()
        departures = self.children[DEPARTURES]
        deadline = time.monotonic() + 60 + self._flights / FLIGHTS_PER_S_MIN
        while departures.exit_code() is None:
            self._look_after_all()
            self._inject_what_is_due()
            self._report()
            if time.monotonic() > deadline:
                raise ProcessError("the departures service does not come to an end")
            time.sleep(0.02)
        if departures.exit_code():
            departures.check()
        departures.hear_out()
        self.figures.departures_s = time.monotonic() - self.figures.started_s
        while self._faults:  # a fast machine, or few flights: the last ones hit what is left to do
            self._inject_what_is_due()
        self._history.write(Heal())
        self._wait_until_drained()
        self.figures.total_s = time.monotonic() - self.figures.started_s
        self._history.write(Drained())
        self.figures.delayed = self._delayed()

    def stop(self) -> None:
        """Stop every process in good order; each must end with code 0."""
        for name in (TALLIES, COUNTER, WATCHDOG):
            self.children[name].ask_to_stop()
        for name in (TALLIES, COUNTER, WATCHDOG, BROKER):
            self._stop(name)

    def log_of(self, name: str) -> str:
        """Everything a process has logged."""
        return self.children[name].log_text()

    def _stop(self, name: str) -> None:
        child = self.children[name]
        code = child.stop()
        if code:
            raise ProcessError(f"{name} ended with code {code} when asked to stop")

    def _start_all(self) -> None:
        self._start_broker()
        for name in (TALLIES, COUNTER, DEPARTURES):
            self.children[name].start()
        wait_until(
            self._has_databases,
            what="the departures service to create its database",
            deadline_s=START_DEADLINE_S,
        )
        self.children[WATCHDOG].start()

    def _has_databases(self) -> bool:
        departures = self.children[DEPARTURES]
        if departures.status.get("ready", False):
            return True
        departures.check()
        return False

    def _start_broker(self) -> None:
        broker = self.children[BROKER]
        broker.start()
        wait_until(self._is_ready, what="the broker to be ready", deadline_s=START_DEADLINE_S)
        broker.check()

    def _is_ready(self) -> bool:
        self.children[BROKER].check()
        try:
            self._get("/readyz")
        except OSError:
            return False
        return True

    def _inject_what_is_due(self) -> None:
        done = int(self.children[DEPARTURES].status.get("done", 0))
        if self._faults and done >= self._faults[0].share * self._flights:
            fault = self._faults.pop(0)
            began_s = time.monotonic()
            getattr(self, "_" + fault.kind.replace(" ", "_"))()
            self.figures.faults.append(
                {
                    "fault": fault.kind,
                    "at_flight": done,
                    "took_s": round(time.monotonic() - began_s, 2),
                }
            )

    def _kill_broker(self) -> None:
        with self._fault("crash", BROKER):
            self.children[BROKER].kill()
            self._start_broker()

    def _stop_broker_for_a_while(self) -> None:
        with self._fault("partition", BROKER):
            self._stop(BROKER)
            deadline = time.monotonic() + ABSENCE_S
            while time.monotonic() < deadline:
                self._report()
                time.sleep(0.05)
            self._start_broker()

    def _kill_departures(self) -> None:
        with self._fault("crash", DEPARTURES):
            self.children[DEPARTURES].kill()
            self.children[DEPARTURES].start()

    def _kill_tallies(self) -> None:
        """Ask the consumer to die in the middle of its next handler, and start it again."""
        with self._fault("crash", TALLIES):
            self.plan.path("die").touch()
            tallies = self.children[TALLIES]
            wait_until(
                lambda: tallies.exit_code() is not None,
                what="the consumer to die in a handler",
                deadline_s=START_DEADLINE_S,
            )
            tallies.start()

    def _look_after_all(self) -> None:
        for child in self.children.values():
            if child.name != DEPARTURES:
                child.check()

    def _report(self) -> None:
        self._on_progress(DEPARTURES, int(self.children[DEPARTURES].status.get("done", 0)))
        for name in (TALLIES, COUNTER):
            self._on_progress(name, self.children[name].total("done"))

    def _wait_until_drained(self) -> None:
        deadline = time.monotonic() + 120.0
        while not self._is_drained():
            self._look_after_all()
            self._report()
            if time.monotonic() > deadline:
                raise ProcessError(f"not drained after 120 s: {self._groups()}")
            time.sleep(0.1)
        self._report()

    def _is_drained(self) -> bool:
        if self._outbox_rows() or self._delayed()["pending"]:
            return False
        groups = self._groups()
        if len(groups) < len(SUBJECTS) * len(GROUPS):
            return False
        return not any(
            group["lag"] or group["in_flight"] or group["redelivery"] for group in groups
        )

    def _outbox_rows(self) -> int:
        """Rows waiting in the departures service's outbox, parked ones included."""
        waiting = f"SELECT count(*) FROM qmq_outbox WHERE state <> {SENT}"
        rows: int = read(self.plan.databases[BOARD], waiting)[0][0]
        return rows

    def _delayed(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self._get("/v1/delayed/status"))
        return status

    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = json.loads(self._get("/v1/groups"))["groups"]
        return groups

    def _get(self, path: str) -> bytes:
        with _OPENER.open(self.plan.broker_url + path, timeout=5) as answer:
            content: bytes = answer.read()
            return content

    def _fault(self, kind: str, target: str) -> _FaultSpan:
        return _FaultSpan(self._history, kind, target)


class _FaultSpan:
    """Notes begin and end of a fault in the history."""

    def __init__(self, history: History, kind: str, target: str) -> None:
        self._history, self._kind, self._target = history, kind, target

    def __enter__(self) -> None:
        self._history.write(Fault(kind=self._kind, target=self._target, phase="begin"))

    def __exit__(self, *_: object) -> None:
        self._history.write(Fault(kind=self._kind, target=self._target, phase="end"))


def free_port() -> int:
    """A TCP port of the loopback address that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
