"""Serve by a wall clock that a file shifts: milliseconds, read at each look; for `test_shifted_clock.py`."""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

from qmq_broker.face.logs import start_logging
from qmq_broker.face.server import serve
from qmq_broker.options import ServeOptions, StoreOptions


class ShiftedClock:
    """The machine's clock, with its wall clock set elsewhere."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + int(self._file.read_text() or 0)

    def monotonic_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--shift", required=True)
    given = parser.parse_args()
    host, _, port = given.listen.partition(":")
    start_logging(logging.INFO)
    options = ServeOptions(
        directory=given.data, host=host, port=int(port), store=StoreOptions(reserve_bytes=0)
    )
    return serve(options, ShiftedClock(Path(given.shift)))


if __name__ == "__main__":
    raise SystemExit(main())
