"""What the whole watchdog does around its sweeps."""

from __future__ import annotations

import gc
from math import inf
from pathlib import Path

import pytest

from qmq_client.settings.config import load_config
from qmq_client.settings.sections import BrokerSection, Config
from qmq_client.signal_flag import SignalFlag
from qmq_watchdog.service import Service

#: Far fewer than the modules of a watchdog are.
MANY_OBJECTS = 10_000


class LookingStop(SignalFlag):
    """Stops the watchdog as soon as it runs, and looks how many objects are left out of collections."""

    objects = 0

    def wait(self, timeout_s: float = inf) -> bool:
        self.objects = gc.get_freeze_count()
        return True


def test_while_a_watchdog_runs_what_it_was_started_with_is_left_out_of_collections() -> None:
    gc.unfreeze()
    stop = LookingStop()
    config = Config()
    assert Service(config, {}).run(stop, SignalFlag(), lambda: config)
    assert stop.objects > MANY_OBJECTS
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("said_by", ["the command line", "a variable", "a file", "nobody"])
def test_a_watchdog_says_which_broker_it_sends_to_and_where_that_was_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said_by: str
) -> None:
    there, file = "http://127.0.0.1:1", tmp_path / "qmq.toml"
    file.write_text(f'[broker]\nurl = "{there}"\n' if said_by == "a file" else "")
    known = load_config(
        environment={"QMQ_BROKER_URL": there} if said_by == "a variable" else {},
        flags={"broker.url": there} if said_by == "the command line" else {},
        file=file,
    )
    stop = SignalFlag()
    stop.set()
    caplog.set_level("INFO", logger="qmq_watchdog")
    service = Service(known.config, {}, broker_from=known.origin_of("broker.url"))
    assert service.run(stop, SignalFlag(), lambda: known.config)
    expected = {
        "the command line": f'broker={there} broker_from="command line"',
        "a variable": f"broker={there} broker_from=QMQ_BROKER_URL",
        "a file": f"broker={there} broker_from={file}",
        "nobody": f"broker={BrokerSection().url} broker_from=built-in",
    }
    assert expected[said_by] in caplog.text
