"""A line to the broker that carries little: batches become as small as it needs, and large again."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq_client.errors import BrokerUnreachableError
from qmq_client.transport.http import ANSWER_TIMEOUT_S
from qmq_client.transport.memory import MemoryBroker, MemoryTransport
from qmq_client.wire.requests import SendAnswer
from qmq_watchdog.sweep import BATCH_BYTES_AIM, PROBE_ROWS, Sweep
from tests.watchdog.rows import left, make_database, make_due, put_rows
from tests.watchdog.transports import HandClock

ROWS = 2 * PROBE_ROWS


class SlowLine(MemoryTransport):
    """Carries so many bytes a second; a frame that needs longer than a call may take never arrives."""

    def __init__(self, broker: MemoryBroker, clock: HandClock, bytes_per_s: float) -> None:
        super().__init__(broker)
        self._clock = clock
        self.bytes_per_s = bytes_per_s
        self.frames: list[int] = []
        self.lost = 0

    def send(self, frame: bytes) -> SendAnswer:
        self.frames.append(len(frame))
        seconds = len(frame) / self.bytes_per_s
        self._clock.elapsed_s += min(seconds, ANSWER_TIMEOUT_S)
        if seconds > ANSWER_TIMEOUT_S:
            self.lost += 1
            raise BrokerUnreachableError("WriteTimeout: the call's deadline passed")
        return super().send(frame)


@pytest.mark.parametrize("bytes_per_s", [125_000, 30_000, 3_000])
def test_O1_a_line_that_is_too_slow_for_a_batch_gets_smaller_ones(
    bytes_per_s: int, tmp_path: Path, broker: MemoryBroker
) -> None:
    database, clock = make_database(tmp_path / "shop.db"), HandClock()
    put_rows(database, ROWS, body=bytes(60_000))
    line = SlowLine(broker, clock, bytes_per_s)
    sweep = Sweep(database, line, clock=clock)
    while waiting := left(database):
        make_due(database, waiting)
        sweep.step()
        assert line.lost < ROWS // 5, "the same is sent again and again"
    needed_s = ROWS * 60_000 / bytes_per_s
    assert clock.elapsed_s < 2 * needed_s, "most of the time the line brings something"
    database.close()


def test_a_line_that_is_quick_again_gets_large_batches_again(
    tmp_path: Path, broker: MemoryBroker
) -> None:
    database, clock = make_database(tmp_path / "shop.db"), HandClock()
    line = SlowLine(broker, clock, 100)
    sweep = Sweep(database, line, clock=clock)
    put_rows(database, PROBE_ROWS, body=bytes(10_000))
    for _ in range(20):
        make_due(database)
        assert not sweep.step().sent
    line.bytes_per_s = 1e9
    put_rows(database, 20 * PROBE_ROWS, body=bytes(10_000))
    make_due(database)
    while left(database):
        sweep.step()
    assert max(line.frames[20:]) > BATCH_BYTES_AIM // 4
    assert len(line.frames) < 60
    database.close()
