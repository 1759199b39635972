"""B10: the memory that large bodies take goes back to the system when they are stored."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from qmq_client.wire.requests import FRAME_CONTENT_TYPE
from tests.broker.service.rig import make_frame
from tests.kit.broker_process import BrokerProcess, read_all
from tests.kit.waiting import wait_for

MIB: Final = 1024 * 1024
#: Nearly the longest record, two of which are nearly the longest frame.
BODY: Final = bytes(4 * MIB - 1_000)
#: So many bodies are received at once, so often.
BODIES: Final = 10
ROUNDS: Final = 4
#: What glibc keeps of freed blocks (`qmq_client/wire/blocks.py`), and as much again for everything else.
KEPT_BYTES_MAX: Final = 2 * 16 * MIB


def memory_bytes(broker: BrokerProcess) -> int:
    """What the process has of the machine's memory now."""
    status = Path(f"/proc/{broker.pid}/status").read_text()
    found = re.search(r"^VmRSS:\s+([0-9]+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def request(bodies: list[bytes]) -> bytes:
    frame = make_frame(bodies)
    head = (
        f"POST /v1/send HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
        f"Content-Type: {FRAME_CONTENT_TYPE}\r\nContent-Length: {len(frame)}\r\n\r\n"
    )
    return head.encode() + frame


def send_together(broker: BrokerProcess, taken_bytes: int) -> int:
    """Bodies of which the broker has nearly all, before the first is whole; how many it took."""
    requests = [request([BODY, BODY]) for _ in range(BODIES)]
    with ExitStack() as stack:
        connections = [stack.enter_context(broker.connection()) for _ in requests]
        for connection, data in zip(connections, requests, strict=True):
            connection.sendall(data[:-1])
        wait_for(lambda: memory_bytes(broker) > taken_bytes, "the bodies to arrive")
        for connection, data in zip(connections, requests, strict=True):
            connection.sendall(data[-1:])
        answers = [read_all(connection) for connection in connections]
    return sum(b"HTTP/1.1 200" in answer for answer in answers)


def test_B10_memory_falls_after_large_bodies(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", "--reserve-bytes", "0") as broker:
        broker.talk(request([b"what is loaded late"]))
        before_bytes = memory_bytes(broker)
        taken_bytes = before_bytes + 2 * KEPT_BYTES_MAX
        stored = [send_together(broker, taken_bytes) for _ in range(ROUNDS)]
        assert all(stored), "a slow disk may refuse some"
        wait_for(lambda: memory_bytes(broker) - before_bytes < KEPT_BYTES_MAX, "the memory to fall")
        assert broker.stop() == 0
