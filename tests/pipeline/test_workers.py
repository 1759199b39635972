"""Work done by processes of this machine: the same answers, errors and tables as by Spark's executors, and no Spark."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.errors import OptionError, PipelineError
from qmq_pipeline.jobs.ingest import ingest
from qmq_pipeline.jobs.ingest_outbox import ingest_outbox
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import MESSAGES, OUTBOX
from qmq_pipeline.work.worker import do_piece, serve
from qmq_pipeline.work.workers import LocalWorkers
from tests.pipeline.world import START_MS, DataDirectory, OutboxDatabase, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from qmq_pipeline.sources.tasks import Workers

#: Any function of the package whose arguments and answer JSON can say.
_FUNCTION = "qmq_pipeline.places.options.number_option"
_BOUNDS = {"option": "--limit", "lowest": 0, "highest": 1_000_000}
_BAD = {**_BOUNDS, "text": "many"}


def piece(number: int) -> dict[str, Any]:
    return {**_BOUNDS, "text": str(number)}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """The processes that are started from here on."""
    processes: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        processes.append(popen(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return processes


def test_answers_come_in_order_from_no_more_processes_than_there_is_work_for(
    started: list[subprocess.Popen[str]],
) -> None:
    told: list[tuple[int, int]] = []
    with LocalWorkers(2, on_tasks=lambda done, total: told.append((done, total))) as workers:
        assert workers.run(_FUNCTION, []) == []
        assert not started
        assert workers.run(_FUNCTION, [piece(7)]) == [7]
        assert len(started) == 1
        told.clear()
        assert workers.run(_FUNCTION, [piece(number) for number in range(40)]) == [*range(40)]
        assert told == [(done, 40) for done in range(1, 41)]
        assert len(started) == 2
    assert [one.returncode for one in started] == [0, 0]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_ctrl_c_does_not_reach_a_process_that_has_only_just_been_started(
    started: list[subprocess.Popen[str]],
) -> None:
    """It comes to all processes of a terminal, and one that is still importing could only die of it."""
    with LocalWorkers(1) as workers:
        workers.run(_FUNCTION, [piece(1)])
        status = Path(f"/proc/{started[0].pid}/status").read_text()
        (blocked,) = re.findall(r"^SigBlk:\s*(\w+)$", status, re.MULTILINE)
        assert int(blocked, 16) & 1 << (signal.SIGINT - 1)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_where_a_system_does_not_tell_which_cores_are_for_this_process_it_has_all_of_them(
    monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[str]]
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with LocalWorkers() as workers:
        workers.run(_FUNCTION, [piece(0), piece(1), piece(2)])
    assert len(started) == 2


def test_an_error_of_a_piece_comes_with_its_class_and_its_words() -> None:
    with LocalWorkers(1) as workers:
        with pytest.raises(OptionError, match="option --limit: many"):
            workers.run(_FUNCTION, [_BAD])
        with pytest.raises(
            PipelineError, match=r"a worker failed: TypeError: .*unexpected keyword"
        ):
            workers.run(_FUNCTION, [{"other": 1}])
        with pytest.raises(PipelineError, match=r"ValueError: os\.getcwd is not of this package"):
            workers.run("os.getcwd", [{}])
        assert workers.run(_FUNCTION, [piece(1)]) == [1]


def test_pieces_behind_one_that_failed_are_left() -> None:
    told: list[int] = []
    with LocalWorkers(1, on_tasks=lambda done, _: told.append(done)) as workers:
        with pytest.raises(OptionError):
            workers.run(_FUNCTION, [piece(1), _BAD, piece(2), piece(3)])
        assert told == [1]
        assert workers.run(_FUNCTION, [piece(4)]) == [4]


def test_no_process_goes_on_with_work_when_another_one_has_failed() -> None:
    told: list[int] = []
    many = 100_000
    with LocalWorkers(2, on_tasks=lambda done, _: told.append(done)) as workers:
        with pytest.raises(OptionError):
            workers.run(_FUNCTION, [_BAD, *([piece(1)] * many)])
        assert len(told) < many
        assert workers.run(_FUNCTION, [piece(4)]) == [4]


def test_a_process_that_dies_is_told_and_the_next_call_starts_another(
    started: list[subprocess.Popen[str]],
) -> None:
    def kill(done: int, total: int) -> None:
        if total == 3 and done == 1:
            started[0].kill()
            started[0].wait()

    with LocalWorkers(1, on_tasks=kill) as workers:
        with pytest.raises(PipelineError, match=r"ended with code -9 .* Run the job again"):
            workers.run(_FUNCTION, [piece(1), piece(2), piece(3)])
        assert workers.run(_FUNCTION, [piece(4)]) == [4]
    assert len(started) == 2


def test_an_interruption_ends_the_processes(started: list[subprocess.Popen[str]]) -> None:
    def interrupt(_: int, __: int) -> None:
        raise KeyboardInterrupt

    workers = LocalWorkers(2, on_tasks=interrupt)
    with pytest.raises(KeyboardInterrupt):
        workers.run(_FUNCTION, [piece(number) for number in range(4)])
    assert len(started) == 2
    assert all(one.returncode is not None for one in started)


def test_a_worker_answers_each_line_and_ends_with_its_input() -> None:
    asked = [{"function": _FUNCTION, "arguments": one} for one in (piece(5), _BAD)]
    answers = io.StringIO()
    serve(io.StringIO("".join(json.dumps(one) + "\n" for one in asked)), answers)
    first, second = (json.loads(line) for line in answers.getvalue().splitlines())
    assert first == {"answer": 5}
    assert second["error"] == "OptionError"
    assert do_piece(_FUNCTION, piece(5)) == 5


def test_P2_a_worker_whose_starter_is_dead_ends_at_once(tmp_path: Path) -> None:
    """The next run may have begun: nothing may be written beside it, not even the same."""
    with socket.create_server(("127.0.0.1", 0)) as broker:
        place = Place(broker_url=f"http://127.0.0.1:{broker.getsockname()[1]}")
        where = {"tables": str(tmp_path), "log": "commitlog", "first": 0, "after": 1}
        asked = {
            "function": "qmq_pipeline.work.ranges.ingest_piece",
            "arguments": {"place": asdict(place), **where},
        }
        with subprocess.Popen(
            [sys.executable, "-m", "qmq_pipeline.work.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            text=True,
        ) as worker:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(asked) + "\n")
            worker.stdin.flush()
            connection, _ = broker.accept()  # it is in the middle of its piece
            worker.stdin.close()
            try:
                assert worker.wait(timeout=10) == 0
            finally:
                worker.kill()
                connection.close()


def test_P2_processes_of_this_machine_and_executors_write_the_same_tables(
    spark: SparkSession, tmp_path: Path
) -> None:
    directory, database = _filled(tmp_path)
    tables = {}
    with LocalWorkers(2) as local:
        both: dict[str, Workers] = {"spark": spark, "local": local}
        for name, workers in both.items():
            config = _config(directory, database, tmp_path / name)
            assert ingest_outbox(workers, config) == {"orders": 300}
            done = ingest(workers, config)
            assert done.rows["messages"] == 300
            assert done.ranges > 4
            assert ingest(workers, config).rows == {}
            lake = Lake(config.tables)
            stored = lake.read(spark, MESSAGES).orderBy("subject", "sequence").collect()
            committed = lake.read(spark, OUTBOX).drop("scanned_at").orderBy("row_id").collect()
            files = [file for one in lake.ranges(MESSAGES) for file in one.files]
            tables[name] = (stored, committed, files)
    assert tables["local"] == tables["spark"]
    database.close()


def test_ingest_archive_and_a_sound_audit_need_no_java(tmp_path: Path) -> None:
    directory, database = _filled(tmp_path)
    database.close()
    url = f"sqlite:///{tmp_path / 'orders.db'}"
    tables, place = ("--tables", str(tmp_path / "tables")), ("--path", str(directory.path))
    ingested = _command("ingest", *tables, *place, "--database", url)
    assert ingested["rows"]["messages"] == 300
    assert list(ingested["outbox"].values()) == [300]
    audited = _command("audit", *tables, "--database", url)
    assert audited["findings"] == dict.fromkeys(audited["findings"], 0)
    archived = _command("archive", "--tables", str(tmp_path / "archive"), *place)
    assert archived["segments"] == 0


def _command(*arguments: str) -> Any:
    """The answer of a command on a machine where there is no Java, or none that can be found."""
    environment = {
        "PATH": "/nowhere",
        "JAVA_HOME": "/nowhere",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, "-m", "qmq_client", "pipeline", *arguments, "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _filled(tmp_path: Path) -> tuple[DataDirectory, OutboxDatabase]:
    directory, database = DataDirectory(tmp_path / "broker"), OutboxDatabase(tmp_path / "orders.db")
    some = messages(MessageIds(1), 300, subjects=("orders", "flights"))
    database.insert(some, created_at_ms=START_MS)
    directory.append(some, at_ms=START_MS + 500, frame_records=20)
    directory.close()
    return directory, database


def _config(directory: DataDirectory, database: OutboxDatabase, tables: Path) -> PipelineConfig:
    return PipelineConfig(
        tables=str(tables),
        place=Place(path=str(directory.path)),
        databases=(database.section,),
        partition_bytes=4 * 1024,
        ranges_per_commit=4,
    )
