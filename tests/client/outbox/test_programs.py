"""Whatever an application does with its transactions, on every driver: sent is exactly what committed.

A failure names its seed; `pytest tests/client/outbox/test_programs.py --seed 1234` runs that alone.
"""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import psycopg
import pytest
from sqlalchemy.engine import CursorResult

from tests.client.outbox.faces import drive
from tests.client.outbox.interference import Fate, make_lock_rows
from tests.client.outbox.programs import Program, is_of_psycopg
from tests.client.publishing import sweep
from tests.client.world import World, a_world
from tests.conftest import MakeDatabase
from tests.kit.waiting import DEADLINE_S
from tests.services.drivers import DRIVERS, Driver, drivers

#: Of each driver, which has others than its neighbours: the ways of an application are the same on all.
PROGRAMS: Final = 200
PROGRAMS_IN_RELEASE: Final = 20_000
#: Parts of a release's programs, to be given to several workers.
CHUNKS_IN_RELEASE: Final = 20
#: How often it is looked, 10 ms apart, whether a cancelled task has given its connection back.
SETTLING_LOOKS: Final = 500
FACES: Final = ("session", "core")


def chunks_of(config: pytest.Config) -> int:
    is_whole = config.getoption("--release") and config.getoption("--seed") is None
    return CHUNKS_IN_RELEASE if is_whole else 1


def seeds_of(config: pytest.Config, driver: Driver, face: str, chunk: int) -> list[int]:
    if (seed := config.getoption("--seed")) is not None:
        return [seed]
    is_release = config.getoption("--release")
    first = 0 if is_release else DRIVERS.index(driver) * PROGRAMS
    count = PROGRAMS_IN_RELEASE if is_release else PROGRAMS
    if face == "core":
        count //= 2  # it has half as many ways
    return list(range(first + chunk, first + count, chunks_of(config)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A chunk goes to one worker."""
    if "chunk" in metafunc.fixturenames:
        metafunc.parametrize("chunk", range(chunks_of(metafunc.config)))


async def all_given_back(world: World) -> bool:
    """Whether every connection is in its pool again; soon, where a task was cancelled.

    SQLAlchemy shields what closes a connection from the cancellation, so it may go on for a while
    after the task has ended. What a driver dropped in the middle of an await is left to the garbage
    collection, which must be able to find it: nothing of ours may hold it.
    """
    if not world.is_async:
        return not world.checked_out()
    for _ in range(SETTLING_LOOKS):
        if not world.checked_out():
            return True
        await asyncio.sleep(0.01)
        gc.collect()
    return not world.checked_out()


def story_of(program: Program) -> str:
    return f"seed {program.seed}: {' '.join(program.trace)}"


def judge(world: World, programs: list[Program]) -> None:
    """Compare what was sent with what another connection sees; one look for all of them."""
    assert world.producer.flush(DEADLINE_S).is_done
    sweep_what_is_left(world)
    committed, sent = world.committed_orders(), world.sent()
    for program in programs:
        own = f"{program.seed}."
        rows = {label for label in committed if label.startswith(own)}
        messages = {label for label in sent if label.startswith(own)}
        story = story_of(program)
        ghosts = messages - rows
        assert not ghosts, f"GHOST {sorted(ghosts)}\n{story}"
        lost = rows - messages - program.excused
        assert not lost, f"LOST {sorted(lost)}\n{story}"
    assert len(sent) == len(set(sent)), "a message is at the broker twice"


def sweep_what_is_left(world: World) -> None:
    """Rows that nobody told the publisher of in time are the watchdog's."""
    if world.stored_ids():
        world.make_due()
        sweep(world)
    assert world.stored_ids() == set()


async def run_programs(world: World, seeds: list[int], face: str) -> list[Program]:
    gc.collect()
    gc.freeze()  # what is collected after a cancelled task is this program's alone
    fate = Fate(world)
    programs = [Program(world, fate, seed) for seed in seeds]
    try:
        for program in programs:
            await program.run(is_core=face == "core")
            if world.kind == "sqlite" and "cancel" in program.trace:
                gc.collect()  # a cancelled task's frames keep a closed connection's lock
            if "!ConnectionResetError" in program.trace:
                # pg8000 lets the socket's error through, so SQLAlchemy ends a session halfway.
                gc.collect()
            assert await all_given_back(world), story_of(program)
    finally:
        fate.close()
        if world.is_async:
            await world.engine.dispose()
    return programs


@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")  # it minds some of the abuses
# After a listener of `commit` that raises, SQLAlchemy gives the connection back in its failed transaction; psycopg
# then refuses its next checkout with AUTOCOMMIT, and SQLAlchemy drops it without a close.
@pytest.mark.filterwarnings("ignore:<psycopg.AsyncConnection .* while still open:ResourceWarning")
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("driver", drivers(), ids=str)
def test_S1_S2_S3_S4_S6_S11_sent_is_exactly_what_committed(
    driver: Driver,
    face: str,
    chunk: int,
    make_database: MakeDatabase,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    seeds = seeds_of(request.config, driver, face, chunk)
    options: dict[str, Any] = {"background": True, "real_clock": True}
    database = make_database(driver.kind)
    with a_world(tmp_path, database=database, driver=driver, **options) as world:
        make_lock_rows(world)
        running = run_programs(world, seeds, face)
        judge(world, asyncio.run(running) if driver.is_async else drive(running))


def test_only_what_psycopg_asserts_ends_a_transaction_instead_of_the_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def enter_twice() -> None:
        connection = psycopg.AsyncConnection.__new__(psycopg.AsyncConnection)
        monkeypatch.setattr(connection, "_pipeline", object(), raising=False)
        async with connection._pipeline_nolock():
            pass

    with pytest.raises(AssertionError) as theirs:
        asyncio.run(enter_twice())
    assert is_of_psycopg(theirs.value)
    connection = SimpleNamespace(_echo=False)
    context = SimpleNamespace(
        dialect=None, cursor=None, root_connection=connection, _num_sentinel_cols=1
    )
    with pytest.raises(AssertionError) as of_no_rows:
        CursorResult(context, None, None)  # type: ignore[arg-type]  # it asserts before it uses any
    assert is_of_psycopg(of_no_rows.value)
    with pytest.raises(AssertionError) as ours:
        raise AssertionError
    assert not is_of_psycopg(ours.value)
