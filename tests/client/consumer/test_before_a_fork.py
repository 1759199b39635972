"""Consumers in servers that fork: made before it, each process is one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from queue import Queue

import httpx
import pytest

from qmq_client import Consumers, Message, consumer
from qmq_client.consumer.identity import Identity
from qmq_client.errors import ConfigurationError
from qmq_client.testing import MemoryBroker, MemoryTransport
from tests.client.consumer.kit import GROUP, SUBJECT, WAIT_S
from tests.kit.broker_process import BrokerProcess

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

#: Imports everything, then forks its workers; ends them in order when its input does.
PRELOADED = """
import os, signal, sys
from qmq_client import Consumers, consumer

@consumer("notices", group="screens", broadcast=True, wait_ms=100)
def show(body: str) -> None:
    os.write(1, f"{os.getpid()} {body}\\n".encode())

consumers = Consumers(show, sys.argv[1])
workers = []
for _ in range(2):
    worker = os.fork()
    if not worker:
        os._exit(0 if consumers.run().is_clean else 1)
    workers.append(worker)
sys.stdin.read()
for worker in workers:
    os.kill(worker, signal.SIGTERM)
print("ended", *[os.waitpid(worker, 0)[1] for worker in workers])
"""


def fork_to(work: Callable[[], bool]) -> bool:
    """Whether it was so in a child."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        is_so = False
        try:
            is_so = work()
        finally:
            os._exit(0 if is_so else 1)
    return os.waitpid(child, 0)[1] == 0


def test_C10_S10_consumers_made_before_the_fork_are_one_of_their_own_in_each_process(
    tmp_path: Path,
) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        message = {"subject": "notices", "body": "closed"}
        httpx.post(
            f"{broker.url}/v1/send", json={"messages": [message]}, timeout=WAIT_S
        ).raise_for_status()
        program = [sys.executable, "-c", PRELOADED, broker.url]
        server = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        shown = [server.stdout.readline().split() for _ in range(2)]
        rest, _ = server.communicate(timeout=WAIT_S)
    assert [body for _, body in shown] == ["closed", "closed"]
    assert shown[0][0] != shown[1][0]
    assert rest == "ended 0 0\n"


def test_S10_a_made_up_name_is_another_in_a_child_and_a_given_one_is_kept() -> None:
    made_up, given = Identity(), Identity("shop-1")
    before = made_up.name
    assert fork_to(lambda: made_up.name != before and given.name == "shop-1")
    assert made_up.name == before


def test_S10_C8_in_a_child_of_the_process_that_started_them_consumers_neither_start_nor_stop() -> (
    None
):
    broker = MemoryBroker()
    handled: Queue[int] = Queue()

    @consumer(SUBJECT, group=GROUP)
    def handler(body: int) -> None:
        handled.put(body)

    consumers = Consumers(handler, MemoryTransport(broker))

    def leave_them_alone() -> bool:
        with pytest.raises(ConfigurationError, match="in each process, after the fork"):
            consumers.start()
        return consumers.stop().is_clean

    with consumers:
        broker.put(Message(SUBJECT, 1))
        assert handled.get(timeout=WAIT_S) == 1
        assert fork_to(leave_them_alone)
        broker.put(Message(SUBJECT, 2))
        assert handled.get(timeout=WAIT_S) == 2
    assert broker.lag(SUBJECT, GROUP) == 0
