"""What the whole watchdog does around its sweeps."""

from __future__ import annotations

import gc
from math import inf

from qmq_client.settings.sections import Config
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
