"""A seed is a world: the same steps and the same history each time, in whatever process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.simulation.database import Databases
from tests.simulation.play import play

#: Worlds with all kinds of groups and troubles between them.
SEEDS = (3, 30, 135, 182)
_ROOT = Path(__file__).parents[2]


def test_a_seed_takes_the_same_steps_after_other_seeds(worlds: Databases) -> None:
    first = [play(seed, worlds).fingerprint for seed in SEEDS]
    assert [play(seed, worlds).fingerprint for seed in reversed(SEEDS)] == first[::-1]


def test_a_seed_takes_the_same_steps_in_another_process(worlds: Databases, tmp_path: Path) -> None:
    """Hashes of text differ from process to process, and nothing may depend on them."""
    here = {seed: play(seed, worlds).fingerprint for seed in SEEDS}
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


def test_worlds_differ(worlds: Databases) -> None:
    assert len({play(seed, worlds).fingerprint for seed in SEEDS}) == len(SEEDS)
