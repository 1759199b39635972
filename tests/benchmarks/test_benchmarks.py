"""Each benchmark's code path runs, in some milliseconds and without a word about how fast."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.machine import find_directory
from benchmarks.suite import BENCHMARKS, Benchmark
from tests.conftest import give_up
from tests.services.run import RUN_VARIABLE, TestRun

#: Servers are started and the other projects installed on the first run of a machine.
DEADLINE_S = 400


#: Peers of a default run; `--release` has all. The others take longest to start.
QUICK_PEERS = "kafka,nats,redis"
#: What is said of a system that could not be had.
MISSING = re.compile(r".* was left out|Without ")


@pytest.fixture(scope="module", autouse=True)
def _run() -> Iterator[None]:
    """Keeps the folder of this run on the disk, so that one benchmark makes each kind of server's files."""
    run = TestRun(where=find_directory(None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_VARIABLE, run.name)
        yield
    run.close()


def bench(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def test_the_list_names_every_benchmark() -> None:
    done = bench("--list")
    assert done.returncode == 0, done.stderr
    for entry in BENCHMARKS:
        assert entry.number in done.stdout
        assert entry.name in done.stdout


def test_an_unknown_name_is_refused_and_the_known_ones_named() -> None:
    done = bench("nonsense")
    assert done.returncode == 2
    assert "no benchmark nonsense; there are: peers peers, R15 handlers" in done.stderr


@pytest.mark.timeout(DEADLINE_S + 20)
@pytest.mark.parametrize("entry", BENCHMARKS, ids=lambda entry: entry.name)
def test_a_tiny_run_brings_rows_and_a_page(
    entry: Benchmark, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    figures = tmp_path / "figures.json"
    pages = tmp_path / "pages"
    line = [entry.number, "--effort", "tiny", "--json", str(figures), "--pages", str(pages)]
    if entry.number == "peers" and not request.config.getoption("--release"):
        line += ["--systems", QUICK_PEERS]
    # pytest's own directory may be in memory, where no benchmark measures
    with tempfile.TemporaryDirectory(dir=find_directory(None)) as work:
        done = bench(*line, "--directory", work)
        assert list(Path(work).iterdir()) == []  # nothing is left behind on the disk
    (result,) = json.loads(figures.read_bytes())["results"]
    if result["failure"].startswith(("RungError", "NoPeersError")):
        give_up(f"benchmark {entry.name} for the tests. {result['failure']}", os.environ)
    if missing := [note for note in result["notes"] if MISSING.match(note)]:
        give_up(f"a part of benchmark {entry.name} for the tests. {'; '.join(missing)}", os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert result["rows"]
    for row in result["rows"]:
        assert len(row["samples"]) >= 1
        assert all(math.isfinite(sample) for sample in row["samples"])
        assert row["conditions"]["durability"]
        assert row["conditions"]["client"]
    assert f"## {entry.number}: {entry.summary}" in (pages / "README.md").read_text()


def test_peers_that_cannot_be_had_are_named_and_the_others_go_on(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    line = ["peers", "--effort", "tiny", "--rounds", "2", "--scale", "0.5", "--json", str(figures)]
    with tempfile.TemporaryDirectory(dir=find_directory(None)) as work:
        done = bench(
            *(*line, "--systems", "nats,rabbitmq", "--directory", work),
            QMQ_TEST_RUNGS="environment",
        )
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(figures.read_bytes())["results"]
    assert [note.partition(":")[0] for note in result["notes"]] == [
        f"{name}, {mode} was left out from round 1 on"
        for mode in ("durable", "default")
        for name in ("NATS JetStream", "RabbitMQ")
    ]
    assert "NATS JetStream, durable was left out" in done.stdout
    assert {row["figure"].rpartition(": ")[2] for row in result["rows"]} == {"qmq"}
    assert {len(row["samples"]) for row in result["rows"]} == {2}
    assert "750 messages per round" in {row["conditions"]["note"] for row in result["rows"]}


def test_a_peer_that_nobody_knows_is_refused_and_the_known_ones_named() -> None:
    done = bench("peers", "--effort", "tiny", "--systems", "nats,pigeons")
    assert done.returncode == 1
    assert "no system pigeons; there are: kafka, nats, rabbitmq, redis, rocketmq" in done.stdout


@pytest.mark.parametrize("option", ["--rounds=0", "--scale=0", "--scale=many"])
def test_a_size_that_is_none_is_refused(option: str) -> None:
    assert bench("peers", option).returncode == 2
