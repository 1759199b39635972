"""B10: a broker with very many dead letters keeps few of them in memory, and all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from qmq_broker.face.exit_codes import ExitCode
from tests.kit.broker_process import SERVE_WITH_FAULTS, BrokerProcess
from tests.kit.waiting import DEADLINE_S

MESSAGES: Final = 20_000
GROUPS: Final = 4
REJECTED: Final = 2_000
LIMITS: Final = ("--limit", "dead_letters_memory_bytes=300000")
#: What stays of each letter in memory, and what the allocator keeps. All in memory took 20 MiB.
GROWN_MIB_MAX: Final = 2 + 10
#: What the kernel shows for the memory of a process.
_RSS: Final = "VmRSS:"


class Caller:
    """Asks one broker."""

    def __init__(self, broker: BrokerProcess, client: httpx.Client) -> None:
        self._broker, self._client = broker, client

    def get(self, path: str, **query: Any) -> Any:
        answer = self._client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, body: object) -> Any:
        answer = self._client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def send(self, subject: str, count: int, **fields: Any) -> None:
        for first in range(0, count, 10_000):
            some = [{"subject": subject, **fields}] * min(10_000, count - first)
            self.post("/v1/send", {"messages": some})

    def pull(self, subject: str, group: str, count: int = 10_000) -> Any:
        wanted = {"subject": subject, "group": group, "consumer": "c", "max_messages": count}
        return self.post("/v1/pull", {**wanted, "wait_ms": 0})

    def group(self, subject: str, group: str) -> Any:
        return self.get("/v1/groups", subject=subject, group=group)["groups"][0]

    def reject(self, count: int) -> None:
        given = self.pull("rejected", "g", count)
        ranges = [[one["pull_sequence"], one["pull_sequence"] + 1] for one in given["messages"]]
        settlement = {
            "token": given["token"],
            "rejects": [{"range": one, "reason": f"no {one[0]}"} for one in ranges],
        }
        who = {"subject": "rejected", "group": "g", "consumer": "c"}
        settled = self.post("/v1/settle", {**who, "settlements": [settlement]})
        assert settled["settled"] == count

    def room(self) -> Any:
        return self.get("/v1/room")["dead_letters"]

    def letters(self, subject: str, group: str) -> list[Any]:
        """Some of all over the group."""
        there = (0, 1_000, 1_023, 1_024, 1_999, MESSAGES // 2, MESSAGES - 1)
        asked = {"subject": subject, "group": group, "count": 1}
        return [self.get("/v1/dead", **asked, first=first)["dead"] for first in there]

    def rss_mib(self) -> float:
        status = Path(f"/proc/{self._broker.pid}/status").read_text(encoding="utf-8").split()
        return int(status[status.index(_RSS) + 1]) / 1024


def fill(caller: Caller) -> None:
    for number in range(GROUPS):
        while True:
            caller.pull("expired", f"g{number}")
            if not caller.group("expired", f"g{number}")["lag"]:
                break


@pytest.mark.timeout(300)
def test_B10_dead_letters_far_beyond_their_memory_are_all_there(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with (
        BrokerProcess(data, *LIMITS, command=SERVE_WITH_FAULTS) as broker,
        # A connection of its own for each request: the broker has more than one life.
        httpx.Client(
            base_url=broker.url,
            timeout=DEADLINE_S,
            limits=httpx.Limits(max_keepalive_connections=0),
        ) as client,
    ):
        caller = Caller(broker, client)
        caller.send("expired", MESSAGES, expires_at_ms=1)
        caller.send("rejected", REJECTED, body="x")
        before_mib = caller.rss_mib()
        fill(caller)
        caller.reject(REJECTED)
        told = caller.room()
        assert told["letters"] == GROUPS * MESSAGES + REJECTED
        assert told["memory_bytes"] <= 300_000
        assert told["file_bytes"] > 1_500_000
        assert caller.rss_mib() - before_mib <= GROWN_MIB_MAX
        known = caller.letters("expired", "g2")
        assert [one[0]["sequence"] for one in known][-1] == MESSAGES - 1
        rejected = caller.letters("rejected", "g")[:5]
        assert [one[0]["error"] for one in rejected[:3]] == ["no 0", "no 1000", "no 1023"]

        asked = {"subject": "rejected", "group": "g", "first": 500, "next": 600}
        assert caller.post("/v1/dead/replay", asked)["count"] == 100
        again = caller.pull("rejected", "g")
        assert len(again["messages"]) == 100
        asked = {"subject": "expired", "group": "g0", "first": 1_000, "next": 3_000}
        assert caller.post("/v1/dead/purge", asked)["count"] == 2_000

        caller.post(
            "/v1/settle", {"subject": "rejected", "group": "g", "consumer": "c", "settlements": []}
        )
        broker.kill()
        assert list((data / "letters").iterdir())
        broker.start()
        assert caller.letters("expired", "g2") == known
        assert caller.letters("rejected", "g")[:5] == rejected
        assert caller.group("expired", "g0")["dead"] == MESSAGES - 2_000
        assert caller.room()["letters"] == GROUPS * MESSAGES - 2_000 + REJECTED - 100
        assert caller.room()["memory_bytes"] <= 300_000

        caller.send("rejected", REJECTED, body="x")
        (tmp_path / "full").touch()
        caller.reject(REJECTED)
        assert caller.letters("expired", "g2") == known
        assert caller.room()["letters"] == GROUPS * MESSAGES - 2_000 + 2 * REJECTED - 100
        (tmp_path / "full").unlink()

        assert broker.stop() == ExitCode.OK
        assert not list((data / "letters").iterdir())
        broker.start()
        assert caller.letters("expired", "g2") == known
