"""F35 on the broker as it is delivered: the wall clock that its process sees is set by libfaketime."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker.delay.test_shifted_clock import HOUR_MS, send, status, stored
from tests.conftest import require
from tests.kit.broker_process import SERVE, BrokerProcess
from tests.kit.waiting import wait_for
from tests.services.shifted import PACKAGE, find_library, remove_what_ended_ones_shared


class SetClock:
    """The environment of a process whose wall clock a test sets; what measures time is left alone."""

    def __init__(self, file: Path, library: Path) -> None:
        self._file = file
        self.set_s(0)
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set_s(self, seconds: int) -> None:
        """So far ahead of the machine's clock, or behind it."""
        made = self._file.with_suffix(".new")
        made.write_text(f"{seconds:+d}s\n")
        made.replace(self._file)


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SetClock]:
    library = require(PACKAGE, find_library)
    made = SetClock(tmp_path / "difference", library)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    yield made
    remove_what_ended_ones_shared()


def test_F35_D1_D3_the_real_process_releases_nothing_early_late_or_twice_when_its_clock_is_set(
    tmp_path: Path, clock: SetClock
) -> None:
    assert os.environ["LD_PRELOAD"]
    data = tmp_path / "data"
    clock.set_s(-3600)  # wrong from the start: that is its time
    with BrokerProcess(data, command=SERVE) as broker:
        send(broker, -HOUR_MS + 1, -HOUR_MS + 120_000, 2 * HOUR_MS)
        wait_for(lambda: stored(broker) == 1, "the first message")
        assert status(broker)["clock"] == ""
        clock.set_s(-7200)  # back while it runs: held
        wait_for(lambda: "set back" in status(broker)["clock"], "the alarm")
        clock.set_s(-3000)  # forward, ten minutes from where it was: a minute at once, then on
        wait_for(lambda: "set forward" in status(broker)["clock"], "the alarm")
        assert (stored(broker), status(broker)["pending"]) == (1, 2)
        wait_for(lambda: stored(broker) == 2, "what is due by then")
        broker.kill()
    clock.set_s(3 * 3600)
    with BrokerProcess(data, command=SERVE) as broker:  # set forward while it was off: as it is
        wait_for(lambda: stored(broker) == 3, "the rest")
        found = status(broker)
        assert (found["pending"], found["clock"]) == (0, "")
        assert broker.stop() == 0
