"""The broker's time in tests. An application's tests have `qmq_client.testing.FakeClock`."""

from __future__ import annotations


class FakeClock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.wall_ms = 1_700_000_000_000
        self.steady_s = 1_000.0

    def now_ms(self) -> int:
        return self.wall_ms

    def monotonic_s(self) -> float:
        return self.steady_s

    def sleep(self, seconds: float) -> None:
        raise AssertionError("neither storage nor service waits by itself")

    def pass_ms(self, ms: int) -> None:
        """Let time pass on both clocks."""
        self.wall_ms += ms
        self.steady_s += ms / 1000
