"""What one run of the demo consists of: its folder, its subjects, its faults."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

DEPARTED = "flight.departed"
CANCELLED = "flight.cancelled"
DELAYED = "flight.delayed"
ARRIVED = "flight.arrived"
#: Sent with the delay of a flight, and due when its boarding closes.
BOARDING_CLOSES = "flight.boarding_closes"
SUBJECTS = (DEPARTED, CANCELLED, DELAYED, ARRIVED, BOARDING_CLOSES)
#: A day of flights takes seconds here: a minute of a flight's delay is so long for its passengers.
DELAY_S_PER_MINUTE = 0.01
#: The database of the departures service.
BOARD = "departures"
TALLIES = "tallies"
COUNTER = "counter"
GROUPS = (TALLIES, COUNTER)
#: A consumer that dies is missed after this long; the product's default of 30 s would only make
#: the demo longer.
LEASE_MS = 5_000
#: How long the broker stays away so that the watchdog has rows to bring back.
ABSENCE_S = 5.0
#: So long accepted rows stay in the outbox of a run that is audited: longer than any run.
KEEP_SENT_S = 86_400
_VARIABLE = "FLIGHTS_PLAN"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Handed to every process of the run in a variable of its environment."""

    directory: str
    #: Addresses by name, for SQLAlchemy; there may be passwords in them.
    databases: dict[str, str]
    port: int
    months: tuple[int, ...]
    #: Only the first days of each month.
    days: int
    #: Accepted rows stay in the outbox, so that an audit sees every commit; 0 for not at all.
    keep_sent_s: int = 0

    @property
    def broker_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def path(self, name: str) -> Path:
        """A file or folder of this run."""
        return Path(self.directory) / name

    def to_environment(self) -> dict[str, str]:
        return {_VARIABLE: msgspec.json.encode(self).decode()}


def plan_from_environment() -> Plan:
    """The plan that the supervisor gave."""
    return msgspec.json.decode(os.environ[_VARIABLE], type=Plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultAt:
    """A fault and when it is injected."""

    #: Share of the flights that had been worked on.
    share: float
    kind: str


#: The order of misfortunes. The tallies service kills itself when told, in a handler; see `consumers.py`.
FAULTS = (
    FaultAt(share=0.12, kind="kill broker"),
    FaultAt(share=0.30, kind="kill tallies"),
    FaultAt(share=0.42, kind="kill departures"),
    FaultAt(share=0.58, kind="stop broker for a while"),
    FaultAt(share=0.80, kind="kill broker"),
)


def percentile(sorted_values: list[float], share: float) -> float:
    """The value below which `share` of the values lie; 0 for none."""
    if not sorted_values:
        return 0.0
    return sorted_values[min(len(sorted_values) - 1, int(share * len(sorted_values)))]


def latency_ms(values: list[float]) -> dict[str, Any]:
    """p50 and p99 of latencies in milliseconds, and how many there were."""
    values.sort()
    return {
        "p50_ms": round(percentile(values, 0.50), 2),
        "p99_ms": round(percentile(values, 0.99), 2),
        "count": len(values),
    }
