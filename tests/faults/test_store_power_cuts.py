"""F24: the power is cut under a broker at work: real system calls, on a file system that forgets."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import pytest

from tests.crash.enumeration import SEED
from tests.faults.store_fuse import cut_power, mounted
from tests.faults.store_load import GROUP, LEASE_MS, Load
from tests.faults.test_store_kills import MESSAGES_MAX, SUBJECTS, started, stored
from tests.kit.checker import check
from tests.kit.events import Drained, Fault, Heal
from tests.kit.expectations import Group, Promises
from tests.kit.verdict import Oracle, Verdict
from tests.services.private import free_port

CUTS: Final = 6
CUTS_BEFORE_A_RELEASE: Final = 300


def judged(place: Path, cuts: int) -> Verdict:
    """A broker under load, whose power is cut so often, and the verdict on it."""
    rng = random.Random(SEED)
    listen = f"127.0.0.1:{free_port()}"
    broker = started(place / "data", listen)
    load = Load(broker.url, SUBJECTS)
    load.start()
    try:
        for _ in range(cuts):
            load.wait_for_accepted(rng.randint(1, MESSAGES_MAX))
            load.events.append(Fault(kind="power_cut", target="broker", phase="begin"))
            broker.kill()
            broker.clean_up()
            cut_power(place, rng.randrange(2**30))
            broker = started(place / "data", listen)
            load.events.append(Fault(kind="power_cut", target="broker", phase="end"))
        load.wait_for_accepted(1)
        load.events.append(Heal())
        load.finish()
        load.events.append(Drained())
        broker.stop()
    finally:
        load.stop()
        broker.clean_up()
    return check(
        [*load.events, *stored(place / "data")],
        groups={GROUP: Group(subjects=frozenset(SUBJECTS), has_effects=False)},
        promises=Promises(lease_ms=LEASE_MS),
    )


@pytest.mark.timeout(0)
def test_B1_B3_B7_B8_C1_whatever_a_power_cut_leaves_of_a_broker_at_work_nothing_is_lost(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    cuts = CUTS_BEFORE_A_RELEASE if request.config.getoption("--release") else CUTS
    with mounted(tmp_path / "disk") as place:
        verdict = judged(place, cuts)
    assert verdict.ok, verdict


def test_a_file_system_that_forgets_what_was_synced_is_noticed(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", is_forgetful=True) as place:
        verdict = judged(place, 1)
    assert verdict.totals.get(Oracle.LOST, 0) > 0, verdict
