"""The database that every world of one test process is played on, and where failing seeds are told."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qmq_client.outbox.database import sqlite
from tests.simulation.database import Databases
from tests.simulation.play import Outcome

Tell = Callable[[Outcome], None]


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Databases]:
    made = Databases(tmp_path_factory.mktemp("worlds"))
    # One strand runs at a time: who waits in real time for another one waits in vain.
    patch = pytest.MonkeyPatch()
    patch.setattr(sqlite, "_LOOKS_MAX", 0)
    gc.collect()
    gc.freeze()  # a tenth of a world is else spent on looking through what is there to stay
    yield made
    patch.undo()
    made.close()


@pytest.fixture
def must_be_good(tmp_path: Path) -> Tell:
    """Fails with the whole story of a world in which a promise was broken."""

    def tell(outcome: Outcome) -> None:
        if not outcome.faults:
            return
        path = tmp_path / f"seed-{outcome.plan.seed}.txt"
        path.write_text(outcome.story())
        faults = "\n  ".join(outcome.faults[:10])
        pytest.fail(
            f"seed {outcome.plan.seed}, every step of which is in {path}:\n  {faults}\n"
            f"again: pytest tests/simulation --seed {outcome.plan.seed}",
            pytrace=False,
        )

    return tell
