"""Crash states of random lives by the thousand or by the million: seeded, resumable, in parallel.

One seed is one life: its crash states, those of its recoveries, those of second lives. What the seeds
did is kept in a journal of JSON lines, so that an interrupted run goes on where it was, as long as the
code stays as it is: what was held of another version says nothing of this one.

    python -m tests.crash.campaign --states 10000000 --journal crash.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import reduce
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from qmq_broker.face.commands.store import end_with_parent
from tests.crash.enumeration import Lived, quietly
from tests.crash.random_lives import random_life
from tests.crash.recording_disk import RecordingDisk
from tests.crash.world import BrokenPromiseError

#: Seeds that one task of the pool goes through.
SEEDS_PER_TASK = 20
#: Every n-th crash state is one that a recovery or a second life begins with.
SAMPLED = 13
ROOT = Path(__file__).resolve().parents[2]
#: What is judged, and what judges it.
JUDGED = ("broker/qmq_broker", "qmq_client/wire", "tests/crash")


class Tally(NamedTuple):
    """What was gone through."""

    #: Different ones, each judged once; or, of a sample, counted once.
    states: int = 0
    #: How often one of them was reached.
    reached: int = 0

    def plus(self, other: Tally) -> Tally:
        """Both together; states of two lives are different ones."""
        return Tally(self.states + other.states, self.reached + other.reached)


def crash_seed(seed: int, *, one_in: int = 1) -> Tally:
    """Check the crash states of one random life, or a sample of them.

    The first opening of an empty directory is the same in all lives and is checked elsewhere.
    """
    try:
        life = Lived(random_life(seed), RecordingDisk(), seed=seed, one_in=one_in)
        life.crash_everywhere(first=life.history.epochs[0][1])
        if seed % 3 == 0:
            life.crash_in_recovery(every=SAMPLED)
        if seed % 3 == 1:
            life.crash_again(every=SAMPLED)
    except BrokenPromiseError as error:
        raise BrokenPromiseError(f"life of seed {seed}: {error}") from error
    return Tally(len(life.census), life.census.reached)


def crash_seeds(first: int, *, states: int, one_in: int) -> tuple[int, int]:
    """Go through seeds from `first` on until there were so many states; returns states and seeds."""
    found, seed = 0, first
    with quietly():
        while found < states:
            found += crash_seed(seed, one_in=one_in).states
            seed += 1
    return found, seed - first


class Campaign:
    """A long run in several processes; a broken promise ends it with its seed."""

    def __init__(self, journal: Path, *, first_seed: int, workers: int) -> None:
        self._journal = journal
        self._first_seed = first_seed
        self._workers = workers
        self.tally = Tally()
        self.seeds = 0
        self._done: set[int] = set()
        self._code = code_mark(ROOT)
        for line in journal.read_text().splitlines() if journal.exists() else ():
            entry = json.loads(line)
            if entry.pop("code", "") == self._code:
                first = entry.pop("first_seed")
                self._note(first, Tally(**entry))

    def run(self, states: int) -> None:
        """Go on until so many different states were judged, in all."""
        began_s = time.monotonic()
        tasks = self._tasks()
        context = get_context("spawn")
        with ProcessPoolExecutor(self._workers, context, initializer=end_with_parent) as pool:
            running: dict[Future[Tally], int] = {}
            while self.tally.states < states:
                while len(running) < self._workers + 1:
                    first = next(tasks)
                    running[pool.submit(_task, first)] = first
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    self._finish(running.pop(future), future.result(), time.monotonic() - began_s)
            pool.shutdown(cancel_futures=True)

    def _tasks(self) -> Iterator[int]:
        firsts = count(self._first_seed, SEEDS_PER_TASK)
        return (first for first in firsts if first not in self._done)

    def _finish(self, first: int, tally: Tally, passed_s: float) -> None:
        self._note(first, tally)
        self._journal.parent.mkdir(parents=True, exist_ok=True)
        with self._journal.open("a") as journal:
            entry = {"code": self._code, "first_seed": first, **tally._asdict()}
            journal.write(json.dumps(entry) + "\n")
        if len(self._done) % 50 == 0:
            print(f"{self.told}, {passed_s:.0f} s", flush=True)

    @property
    def told(self) -> str:
        """What was gone through, in words."""
        states, reached = self.tally
        return f"{states} different crash states of {self.seeds} lives, reached {reached} times"

    def _note(self, first: int, tally: Tally) -> None:
        self._done.add(first)
        self.tally = self.tally.plus(tally)
        self.seeds += SEEDS_PER_TASK


def code_mark(root: Path) -> str:
    """Another one for each version of what is judged and of what judges it."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for folder in JUDGED for path in (root / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _task(first: int) -> Tally:
    with quietly():
        seeds = range(first, first + SEEDS_PER_TASK)
        return reduce(Tally.plus, (crash_seed(seed) for seed in seeds))


def main() -> None:
    """Run a campaign from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=10_000_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--journal", type=Path, default=Path(".cache/crash-states.jsonl"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    campaign = Campaign(options.journal, first_seed=options.first_seed, workers=options.workers)
    campaign.run(options.states)
    print(f"{campaign.told}: every promise held")


if __name__ == "__main__":
    main()
