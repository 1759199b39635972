"""B10: what is counted is what the process takes, by the system's own count: filled up to the bound."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.kit.broker_process import ROOT

#: Of the groups, in the ordinary tests and before a release.
LIMIT_MIB: Final = 16
RELEASE_LIMIT_MIB: Final = 256
#: What the process takes besides: what was read and written lately, and what its allocator keeps.
BESIDES_MIB: Final = 48
FILL: Final = """
import sys
from pathlib import Path
from qmq_broker.errors import BusyError
from qmq_broker.service.limits import ServiceLimits
from tests.broker.service.rig import Rig
from tests.broker.service.test_memory_budget import fill, rss_mib

directory, kind, limit_mib = sys.argv[1:]
limits = ServiceLimits(groups_bytes=int(limit_mib) * 1024 * 1024)
rig = Rig(Path(directory), limits=limits)
expiry = {"expires_at_ms": 1} if kind == "expired" else {}
for _ in range(10):
    fill(rig, 10_000, **expiry)
for _ in range(20 if kind != "expired" else 0):
    given = rig.pull(group="warm", max_messages=10_000)
    if given.records:
        rig.settle(given.ack(), group="warm")
before = rss_mib()
try:
    for number in range(1_000_000):
        group, consumer = f"g{number // 50}", f"c{number % 50}"
        given = rig.pull(consumer, group=group, max_messages=1 if kind == "held" else 1_000)
        if kind == "rejected" and given.records:
            rig.settle(given.reject("no " * 20), consumer, group=group)
except BusyError as refused:
    print(rss_mib() - before, refused.field)
"""


@pytest.mark.parametrize("kind", ["expired", "rejected", "held"])
def test_B10_the_process_takes_no_more_than_was_counted(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    limit_mib = RELEASE_LIMIT_MIB if request.config.getoption("--release") else LIMIT_MIB
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(tmp_path), kind, str(limit_mib)],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'broker'}"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    grown, field = done.stdout.split(maxsplit=1)
    assert field.strip() == "memory of all groups"
    assert float(grown) <= limit_mib + BESIDES_MIB
