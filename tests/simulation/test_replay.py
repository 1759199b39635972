"""A seed is a world: the same steps and the same history each time, in whatever process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.database import Databases
from tests.simulation.play import play

#: Between them these worlds have all kinds of groups, messages and troubles.
SEEDS = (0, 3, 26, 33, 34, 99, 210)
_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def here(worlds: Databases) -> dict[int, str]:
    """What this process made of the seeds, one after the other."""
    return {seed: play(seed, worlds).fingerprint for seed in SEEDS}


def test_a_seed_takes_the_same_steps_after_other_seeds(
    here: dict[int, str], worlds: Databases
) -> None:
    assert {seed: play(seed, worlds).fingerprint for seed in reversed(SEEDS)} == here


def test_a_seed_takes_the_same_steps_in_another_process(
    here: dict[int, str], tmp_path: Path
) -> None:
    """Hashes of text differ from process to process, and nothing may depend on them."""
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.simulation.database import Databases\n"
        "from tests.simulation.play import play\n"
        "worlds = Databases(Path(sys.argv[1]))\n"
        "for seed in sys.argv[2:]: print(seed, play(int(seed), worlds).fingerprint)\n"
    )
    paths = [str(_ROOT / folder) for folder in (".", "broker", "watchdog", "migrations")]
    for hash_seed in ("1", "2"):
        directory = tmp_path / hash_seed
        directory.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", code, str(directory), *map(str, SEEDS)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "PYTHONHASHSEED": hash_seed,
            },
            capture_output=True,
            text=True,
            check=True,
        )
        there = dict(line.split() for line in done.stdout.splitlines())
        assert {int(seed): print_ for seed, print_ in there.items()} == here


def test_worlds_differ(here: dict[int, str]) -> None:
    assert len(set(here.values())) == len(SEEDS)
