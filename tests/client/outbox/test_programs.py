"""Whatever an application does with its transactions: sent is exactly what committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.client.outbox.programs import Program
from tests.client.world import World, a_world

PROGRAMS = 300
CHUNKS = 10


def run_program(world: World, seed: int) -> Program:
    program = Program(world, seed)
    program.run()
    return program


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_S1_S2_S3_S4_sent_is_exactly_what_committed(chunk: int, tmp_path: Path) -> None:
    for seed in range(chunk, PROGRAMS, CHUNKS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        with a_world(folder) as world:
            program = run_program(world, seed)
            story = f"seed {seed}: {' '.join(program.trace)}"
            orders = world.committed_orders()
            committed = {program.labels[label] for label in orders if label in program.labels}
            assert world.stored_ids() == committed, story
            assert world.producer.flush(), story
            assert world.sent_ids() == committed, story
            assert world.stored_ids() == set(), story
            assert world.checked_out() == 0, story
