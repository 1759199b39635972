"""F31, F33: handlers that end, hang or fill their process, and consumers that are killed all the time."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.client.truth import Truth
from tests.client.world import SUBJECT, set_up
from tests.conftest import MakeDatabase
from tests.faults import handlers_process
from tests.faults.test_partitioned_consumer import send
from tests.kit import warm
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S, wait_for

ROOT: Final = Path(__file__).resolve().parents[2]
BAD: Final = ["kill", "raise", "hang", "memory"]
CONSUMERS: Final = 2
KILLS: Final = 4
MESSAGES: Final = 20


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """One without other messages."""
    with BrokerProcess(tmp_path / "data") as process:
        yield process


class Effects:
    """What handlers have done in their database."""

    def __init__(self, make_database: MakeDatabase, kind: str) -> None:
        self.url = make_database(kind).url
        set_up(self.url)
        self._truth = Truth(self.url)
        self._truth.change("CREATE TABLE effect (label VARCHAR(100) NOT NULL)")

    def read(self) -> list[str]:
        return sorted(str(row[0]) for row in self._truth.read("SELECT label FROM effect"))

    def has_come_to(self, count: int) -> bool:
        return len(self.read()) >= count


@contextmanager
def process_of(module: str, *arguments: str) -> Iterator[warm.Process]:
    """A process of the tests that does not outlive the block."""
    process = warm.start([f"tests.faults.{module}", *arguments], stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def dead_letters(broker_url: str) -> list[str]:
    where = {"subject": SUBJECT, "group": handlers_process.GROUP, "messages": "1"}
    answer = httpx.get(f"{broker_url}/v1/dead", params=where, timeout=DEADLINE_S)
    return sorted(one["message"]["body"] for one in answer.json().get("dead", ()))


def test_F31_C4_C6_C9_handlers_that_end_hang_or_fill_their_process_take_no_other_message_along(
    make_database: MakeDatabase, broker: BrokerProcess
) -> None:
    # SQLite has one writer: a handler that hangs in its transaction keeps all others from theirs.
    effects = Effects(make_database, "postgresql")
    good = [f"{number}" for number in range(MESSAGES)]
    send(broker.url, [*BAD, *good])  # so that the first pull has all of them in hand
    ended = 0

    def is_done(process: warm.Process) -> bool:
        dead = dead_letters(broker.url)
        assert set(dead) <= set(BAD), "taken along by the one that kills"
        done = dead == sorted(BAD) and effects.read() == sorted(good)
        return done or process.poll() is not None

    while dead_letters(broker.url) != sorted(BAD) or effects.read() != sorted(good):
        with process_of("handlers_process", effects.url, broker.url) as process:
            wait_for(partial(is_done, process), lambda: (dead_letters(broker.url), effects.read()))
            if process.poll() is not None:
                assert process.returncode == -signal.SIGKILL
                ended += 1
    assert ended == handlers_process.ATTEMPTS, "a message that kills its process is counted too"


def test_F33_C1_C3_C5_consumers_that_are_killed_one_after_the_other_lose_and_double_nothing(
    make_database: MakeDatabase, broker: BrokerProcess
) -> None:
    effects = Effects(make_database, "sqlite")
    labels: list[str] = []
    with ExitStack() as stack:

        def start() -> warm.Process:
            return stack.enter_context(process_of("consumer_process", effects.url, broker.url))

        processes = [start() for _ in range(CONSUMERS)]
        for time in range(KILLS):
            before = len(labels)
            labels += [f"{time}.{number}" for number in range(MESSAGES)]
            send(broker.url, labels[before:])
            wait_for(partial(effects.has_come_to, before + MESSAGES // 4))
            processes.pop(0).kill()
            processes.append(start())
        wait_for(partial(effects.has_come_to, len(labels)), effects.read)
    assert effects.read() == sorted(labels)
