"""What the benchmark of the peers does without running one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.measure import Effort
from benchmarks.message_peers import NoSystemError, load_of, wanted
from benchmarks.peers import turns
from benchmarks.peers.contenders import CONTENDERS, Servers, reason
from benchmarks.peers.traffic import age_ms, bodies, stamped
from benchmarks.peers.with_qmq import OPTIONS, batches_of
from benchmarks.suite import Asked, Bench


def bench(directory: Path, effort: Effort, **asked: object) -> Bench:
    return Bench(effort=effort, directory=directory, asked=Asked(**asked))  # type: ignore[arg-type]  # any field of it


def test_a_full_run_has_every_system_in_both_modes_and_ours_once(tmp_path: Path) -> None:
    full = bench(tmp_path, Effort.FULL)
    found = [one.key for one in wanted(full)]
    assert found[0] == "qmq"
    systems = {name.rpartition(", ")[0] for name in found[1:]}
    assert len(systems) == 6
    assert set(found[1:]) == {
        f"{name}, {mode}" for name in systems for mode in ("durable", "default")
    }
    assert full.notes == []


@pytest.mark.parametrize("effort", [Effort.TINY, Effort.QUICK])
def test_a_short_run_says_whom_it_leaves_out(tmp_path: Path, effort: Effort) -> None:
    short = bench(tmp_path, effort)
    found = [one.key for one in wanted(short)]
    assert "Kafka, durable" in found
    assert "Redis Streams, default" in found
    assert len(found) + len(short.notes) == len(CONTENDERS)
    assert short.notes[0] == "Kafka, default: in a full run only, because it starts slowly."


def test_systems_are_chosen_by_their_short_names(tmp_path: Path) -> None:
    chosen = wanted(bench(tmp_path, Effort.FULL, systems=("nats", "kafka")))
    assert {one.engine for one in chosen} == {"", "nats", "kafka"}
    with pytest.raises(NoSystemError, match="no system pigeons; there are: kafka, nats"):
        wanted(bench(tmp_path, Effort.FULL, systems=("nats", "pigeons")))


def test_a_scale_multiplies_messages_but_leaves_enough_to_measure(tmp_path: Path) -> None:
    ours = CONTENDERS[0]
    once = load_of(bench(tmp_path, Effort.FULL), ours)
    assert load_of(bench(tmp_path, Effort.FULL, scale=2.0), ours).stored == 2 * once.stored
    assert load_of(bench(tmp_path, Effort.TINY, scale=0.001), ours).stored == 100


def test_a_server_ends_with_the_last_of_those_that_share_it(tmp_path: Path) -> None:
    ours = CONTENDERS[0]
    servers = Servers(bench(tmp_path, Effort.TINY), [ours, ours])
    first = servers.start(ours)
    assert servers.start(ours) is first
    used_s = first.cpu_s()
    assert used_s > 0
    servers.release(ours)
    assert first.cpu_s() >= used_s
    servers.release(ours)
    assert first.cpu_s() == 0
    servers.close()


def test_a_frame_is_as_large_as_the_publishers() -> None:
    count = 2 * OPTIONS.batch_messages + 1
    assert [len(batch) for batch in batches_of(bodies(10, count))] == [
        OPTIONS.batch_messages,
        OPTIONS.batch_messages,
        1,
    ]
    large = random.Random(1).randbytes(OPTIONS.batch_bytes // 2)
    assert [len(batch) for batch in batches_of(iter([large] * 3))] == [2, 1]
    assert [len(batch) for batch in batches_of(iter([large * 3] * 2))] == [1, 1]


def test_bodies_have_their_size_and_do_not_repeat_at_once() -> None:
    made = list(bodies(100, 500))
    assert {len(body) for body in made} == {100}
    assert len(set(made)) == 500
    assert len(stamped(100)) == 100
    assert 0 <= age_ms(stamped(100)) < 60_000


def test_the_processor_time_of_each_side_is_that_of_one_message() -> None:
    figures = turns.batch_figures((100, turns.DRAIN), 1_000, 0.5, (0.002, 0.003))
    assert figures == {
        (100, turns.DRAIN, turns.RATE): 2_000,
        (100, turns.DRAIN, turns.BROKER): pytest.approx(2),
        (100, turns.DRAIN, turns.CLIENT): pytest.approx(3),
    }


def test_a_reason_is_the_first_and_the_last_line_and_names_no_package_index() -> None:
    assert reason(ValueError("it failed")) == "it failed"
    said = "it failed\n  File x\n\n  not at https://user:word@index.example/simple/ \n"
    assert reason(ValueError(said)) == "it failed: not at …"
