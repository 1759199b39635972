"""A broker that waits for nobody who reads its log."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from qmq_broker.face.logs import LINES_WAITING_MAX, LogWriter, Repeats, dropped_lines
from tests.broker.face.guard import add_token
from tests.kit.broker_process import END_S_MAX, ROOT, SERVE
from tests.kit.ports import free_port
from tests.kit.waiting import wait_for


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("test", logging.INFO, __file__, 1, text, None, None)


class Pipe:
    """Takes at most some bytes at a time, as a pipe does."""

    def __init__(self, takes: int = 100) -> None:
        self.takes = takes
        self.written = b""

    def write(self, data: bytes) -> int:
        self.written += data[: self.takes]
        return len(data[: self.takes])

    @property
    def lines(self) -> list[str]:
        return self.written.decode().splitlines()


def test_lines_are_written_whole_and_in_order() -> None:
    pipe = Pipe(takes=7)
    writer = LogWriter(pipe.write)
    for number in range(20):
        writer.emit(record(f"line {number} is longer than that"))
    writer.step()
    assert pipe.lines == [f"line {number} is longer than that" for number in range(20)]
    assert writer.dropped == 0


def test_B10_lines_that_nobody_reads_are_dropped_and_counted_and_nobody_waits() -> None:
    pipe = Pipe()
    writer = LogWriter(pipe.write)
    for number in range(LINES_WAITING_MAX + 7):
        writer.emit(record(f"{number}"))
    assert writer.dropped == 7
    writer.step()
    assert pipe.lines == [
        *map(str, range(LINES_WAITING_MAX)),
        "log_lines_dropped lines=7 total=7",
    ]
    writer.emit(record("next"))
    writer.step()
    assert pipe.lines[-1] == "next", "told once"


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("closed")])
def test_a_log_whose_reader_is_gone_ends_nothing(error: Exception) -> None:
    def write(_: bytes) -> int:
        raise error

    writer = LogWriter(write)
    writer.emit(record("a"))
    writer.step()
    assert writer.dropped == 1


def test_the_dropped_lines_of_this_process_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LogWriter(Pipe().write)
    writer.dropped = 3
    before = dropped_lines()
    monkeypatch.setattr(logging.getLogger(), "handlers", [writer])
    assert (before, dropped_lines()) == (0, 3)


def test_what_is_repeated_without_end_is_reported_at_doubling_intervals() -> None:
    repeats = Repeats()
    told = [
        (tenth / 10, count) for tenth in range(2_000) if (count := repeats.due("a", tenth / 10))
    ]
    assert [round(at_s) for at_s, _ in told] == [0, 1, 3, 7, 15, 31, 63, 127, 191]
    assert sum(count for _, count in told) == 1_911
    assert repeats.due("b", 191.0, 5) == 5, "another kind has intervals of its own"


def test_what_was_left_is_reported_later_and_quiet_begins_again() -> None:
    repeats = Repeats()
    assert [repeats.due("a", at_s, count) for at_s, count in ((0, 0), (0, 1), (0.5, 4))] == [
        0,
        1,
        0,
    ]
    assert [repeats.due("a", at_s, 0) for at_s in (0.9, 1.0, 1.5)] == [0, 4, 0]
    assert [repeats.due("a", at_s, 1) for at_s in (100, 100.5, 101, 102)] == [1, 0, 2, 0]


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """The end to write to of a pipe that is full, and that nobody reads."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, bytes(4096))
    os.set_blocking(write, True)
    yield write
    os.close(read)
    os.close(write)


def test_B10_a_broker_whose_log_nobody_reads_serves_and_stops(
    tmp_path: Path, full_pipe: int
) -> None:
    tokens = tmp_path / "tokens.json"
    token = add_token(tokens, "admin")[1]
    url = f"http://127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [sys.executable, *SERVE, "--data", str(tmp_path / "data"), "--tokens", str(tokens),
         "--listen", url.removeprefix("http://"), "--log-level", "debug"],
        stderr=full_pipe,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'broker'}"},
    )  # fmt: skip
    try:
        with httpx.Client(base_url=url, timeout=END_S_MAX) as client:

            def is_up() -> bool:
                with contextlib.suppress(httpx.ConnectError):
                    return client.get("/readyz").status_code == 200
                return False

            wait_for(is_up, within_s=END_S_MAX)
            assert client.get("/v1/subjects").status_code == 401
            known = {"authorization": f"Bearer {token}"}
            for number in range(50):
                body = {"messages": [{"subject": "orders", "body": number}]}
                assert client.post("/v1/send", json=body, headers=known).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S_MAX) == 0
    finally:
        process.kill()
        process.wait()
