"""`qmq pipeline ingest --follow`: news come into the tables until a signal ends it, cleanly."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import pytest

from qmq_client.signal_flag import SignalFlag
from qmq_client.wire.frame import build_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import encode_record
from qmq_pipeline.errors import (
    ExpiredRangeError,
    LakeError,
    LakeInUseError,
    PipelineError,
    SourceError,
)
from qmq_pipeline.jobs.follow import follow
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import MESSAGES
from qmq_pipeline.work.workers import LocalWorkers
from tests.pipeline.gold import pulled
from tests.pipeline.quick import quick_environment
from tests.pipeline.world import FORGETFUL, DataDirectory, messages

if TYPE_CHECKING:
    from collections.abc import Mapping

START = "import sys; from qmq_client.commands.root import root; root(sys.argv[1:])"


def test_what_comes_into_both_logs_comes_into_the_tables_until_it_is_stopped(
    directory: DataDirectory, config: PipelineConfig
) -> None:
    directory.append(messages(MessageIds(1), 30))
    stop = SignalFlag()
    seen: list[Mapping[str, int]] = []

    def on_batch(rows: Mapping[str, int]) -> None:
        seen.append(rows)
        if len(seen) == 1:  # this is the end of the first run; looks at what is new follow it
            directory.append(messages(MessageIds(2), 20))
        elif sum(one.get("actions", 0) for one in seen):
            stop.set()
        elif sum(one.get("messages", 0) for one in seen) == 50:
            directory.act([pulled(0, 5, directory.clock.now_ms())])

    with LocalWorkers() as workers:
        done = follow(workers, config, stop, every_s=0.1, on_batch=on_batch)
    assert (done.rows["messages"], done.rows["actions"]) == (50, 1)
    assert rows_of(config) == 50


def test_an_error_on_the_way_ends_it_and_is_raised_as_it_was(
    directory: DataDirectory, config: PipelineConfig
) -> None:
    directory.append(messages(MessageIds(1), 10))

    def on_batch(_: Mapping[str, int]) -> None:
        (Path(config.tables) / "LAKE").write_text('{"version": 9}')
        directory.append(messages(MessageIds(2), 10))

    with LocalWorkers() as workers, pytest.raises(LakeError, match="version 9"):
        follow(workers, config, SignalFlag(), every_s=0.1, on_batch=on_batch)


@pytest.mark.parametrize("has_news", [True, False], ids=["news", "none"])
@pytest.mark.parametrize("gone", ["removed", "moved", "unmounted"])
def test_tables_that_vanish_end_it_and_no_new_ones_are_begun(
    directory: DataDirectory, config: PipelineConfig, tmp_path: Path, gone: str, has_news: bool
) -> None:
    directory.append(messages(MessageIds(1), 10))
    tables = Path(config.tables)

    def on_batch(_: Mapping[str, int]) -> None:
        tables.rename(tmp_path / "elsewhere")
        if gone == "removed":
            shutil.rmtree(tmp_path / "elsewhere")
        elif gone == "unmounted":
            tables.mkdir()  # what is below the mount
        if has_news:
            directory.append(messages(MessageIds(2), 10))

    with LocalWorkers() as workers, pytest.raises(LakeError, match="not there any more") as told:
        follow(workers, config, SignalFlag(), every_s=0.01, on_batch=on_batch)
    assert told.value.path == config.tables
    assert not (tables.exists() and any(tables.iterdir()))


class Enough(SignalFlag):
    """Set after some looks that found nothing."""

    left = 3

    def wait(self, timeout_s: float = inf) -> bool:
        self.left -= 1
        return not self.left or super().wait(timeout_s)


def test_another_store_with_a_shorter_log_is_told_at_the_next_look(
    directory: DataDirectory, config: PipelineConfig, tmp_path: Path
) -> None:
    """Not only once it has grown beyond: retention does not wait for what nobody reads until then."""
    other = DataDirectory(tmp_path / "other")
    other.append(messages(MessageIds(2), 5))
    other.close()
    directory.append(messages(MessageIds(1), 20))

    def on_batch(_: Mapping[str, int]) -> None:
        directory.close()
        shutil.rmtree(directory.path)
        other.path.rename(directory.path)

    with LocalWorkers(1) as workers, pytest.raises(SourceError, match="are of store"):
        follow(workers, config, Enough(), every_s=0.01, on_batch=on_batch)
    directory.open()


def test_the_same_store_with_a_shorter_log_is_told_at_the_next_look(
    directory: DataDirectory, config: PipelineConfig, tmp_path: Path
) -> None:
    """It was restored from a backup, whose log ends before what was read: behind that nothing is new for long."""
    backup = tmp_path / "backup"
    directory.append(messages(MessageIds(1), 20))
    shutil.copytree(directory.path, backup)
    directory.append(messages(MessageIds(2), 20))

    def on_batch(_: Mapping[str, int]) -> None:
        directory.close()
        shutil.rmtree(directory.path)
        backup.rename(directory.path)

    with LocalWorkers(1) as workers, pytest.raises(SourceError, match="restored from a backup"):
        follow(workers, config, Enough(), every_s=0.01, on_batch=on_batch)
    directory.open()


def test_while_another_job_writes_the_tables_news_wait_and_none_is_lost(
    directory: DataDirectory, config: PipelineConfig
) -> None:
    directory.append(messages(MessageIds(1), 10))
    stop, other = SignalFlag(), ExitStack()
    looks: list[None] = []

    class Looked(SignalFlag):
        """Counts the waits, which are between two looks."""

        def wait(self, timeout_s: float = inf) -> bool:
            looks.append(None)
            if len(looks) == 5:
                assert rows_of(config) == 10, "not before the other job is done"
                other.close()
            return stop.is_set() or super().wait(timeout_s)

    def on_batch(_: Mapping[str, int]) -> None:
        if looks:
            stop.set()
            return
        other.enter_context(Lake(config.tables).writing())
        directory.append(messages(MessageIds(2), 10))

    with LocalWorkers() as workers:
        with Lake(config.tables).writing(), pytest.raises(LakeInUseError):
            follow(workers, config, stop, every_s=0.1, on_batch=on_batch)
        done = follow(workers, config, Looked(), every_s=0.01, on_batch=on_batch)
    assert (done.batches, rows_of(config)) == (2, 20)


def test_what_retention_passed_between_two_looks_is_told_as_that(tmp_path: Path) -> None:
    """Not as a log that was restored: the frame that was read last is not there any more either way."""
    directory = DataDirectory(tmp_path / "broker", FORGETFUL)
    config = PipelineConfig(tables=str(tmp_path / "tables"), place=Place(path=str(directory.path)))
    directory.append(messages(MessageIds(1), 400))

    def on_batch(_: Mapping[str, int]) -> None:
        directory.append(messages(MessageIds(2), 3000), frame_records=20)
        directory.forget(segments=3)

    with LocalWorkers() as workers, pytest.raises(ExpiredRangeError, match="Ingest more often"):
        follow(workers, config, SignalFlag(), every_s=0.1, on_batch=on_batch)
    directory.close()


def test_it_goes_on_when_retention_has_passed_the_frame_that_was_read_last(tmp_path: Path) -> None:
    """The frame fills its segment to the last byte, so the log goes on in the next one, and this one may go."""
    directory = DataDirectory(tmp_path / "broker", FORGETFUL)
    config = PipelineConfig(tables=str(tmp_path / "tables"), place=Place(path=str(directory.path)))
    directory.append(messages(MessageIds(1), 100))
    (last,) = messages(MessageIds(2), 1)
    room = FORGETFUL.segment_bytes - directory.store.durable_offset
    taken = len(build_message_frame({last.subject: [encode_record(last)]}))
    body = last.body + b"." * (room - taken)
    filling = msgspec.structs.replace(last, body=body)
    directory.append([filling])
    stop = SignalFlag()

    def on_batch(rows: Mapping[str, int]) -> None:
        if rows["messages"] == 20:
            stop.set()
            return
        assert directory.store.durable_offset == FORGETFUL.segment_bytes
        directory.append(messages(MessageIds(3), 20))
        directory.forget(segments=1)

    with LocalWorkers() as workers:
        follow(workers, config, stop, every_s=0.1, on_batch=on_batch)
    assert rows_of(config) == 121
    directory.close()


def rows_of(config: PipelineConfig) -> int:
    return sum(one.rows for one in Lake(config.tables).ranges(MESSAGES))


#: Waits for a signal as the command does, without anything to follow.
WAITING = """
from qmq_pipeline.command import until_signalled
with until_signalled() as stop:
    print("waiting", flush=True)
    stop.wait()
    print("stopping", flush=True)
    stop.clear()
    stop.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_the_first_signal_asks_to_end_and_the_second_ends(number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for word in ("waiting", "stopping"):
        assert process.stdout.readline() == f"{word}\n"
        process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == -number


@pytest.mark.timeout(120)
def test_ctrl_c_ends_the_command_with_all_committed_and_exit_code_0(
    directory: DataDirectory, tmp_path: Path
) -> None:
    """What a terminal does: SIGINT for the whole group of processes, its workers among them. It has no Java."""
    directory.append(messages(MessageIds(1), 30))
    folders = ["--tables", str(tmp_path / "tables"), "--path", str(directory.path)]
    command = subprocess.Popen(
        [
            sys.executable,
            "-c",
            START,
            "pipeline",
            "ingest",
            "--follow",
            "--every",
            "0.2",
            "--json",
            *folders,
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "JAVA_HOME": str(tmp_path / "none"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert command.stdout is not None
    assert _next(command.stdout)["rows"]["messages"] == 30
    directory.append(messages(MessageIds(2), 20))
    assert _next(command.stdout)["rows"]["messages"] == 20
    os.killpg(command.pid, signal.SIGINT)
    said, errors = command.communicate(timeout=120)
    assert command.returncode == 0, errors
    assert json.loads(said)["rows"]["messages"] == 50
    ranges = Lake(str(tmp_path / "tables")).ranges(MESSAGES)
    assert sum(one.rows for one in ranges) == 50


def _next(output: IO[str]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = json.loads(output.readline())
    return found


#: Follows like the command, and dies at the second commit of messages: before it, or right after.
DYING = """
import os, signal, sys
from qmq_client.commands.root import root
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import MESSAGES

when, *arguments = sys.argv[1:]
commit, commits = Lake.commit, []

def counted(lake, table, *given, **named):
    commits.extend([table] if table is MESSAGES else [])
    is_last = len(commits) == 2
    if is_last and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    made = commit(lake, table, *given, **named)
    if is_last and table is MESSAGES:
        os.kill(os.getpid(), signal.SIGKILL)
    return made

Lake.commit = counted
root(arguments)
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_P2_who_is_killed_in_the_middle_of_a_batch_leaves_each_row_once_to_the_next(
    directory: DataDirectory, config: PipelineConfig, when: str
) -> None:
    directory.append(messages(MessageIds(1), 30))
    where = ["--tables", config.tables, "--path", str(directory.path)]
    how = ["--follow", "--every", "0.1", "--json"]
    with subprocess.Popen(
        [sys.executable, "-c", DYING, when, "pipeline", "ingest", *how, *where],
        env=quick_environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None
        assert _next(command.stdout)["rows"]["messages"] == 30
        directory.append(messages(MessageIds(2), 20))
        assert command.stdout.read() == "", "nothing is told of the batch that broke off"
    assert command.returncode == -signal.SIGKILL
    assert rows_of(config) == (30 if when == "before" else 50)
    directory.append(messages(MessageIds(3), 10))
    stop = SignalFlag()
    with LocalWorkers(1) as workers:
        follow(workers, config, stop, every_s=0.1, on_batch=lambda _: stop.set())
    assert sequences(config) == [*range(60)]


def test_P2_a_worker_that_is_killed_in_the_middle_of_a_batch_ends_it_and_the_next_goes_on(
    directory: DataDirectory, config: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch has several commits: one is made, and the worker dies on the way to the next."""
    small = replace(config, partition_bytes=4096, ranges_per_commit=2)
    started: list[subprocess.Popen[str]] = []
    popen, calls, stop = subprocess.Popen, list[int](), SignalFlag()

    def start(*given: Any, **named: Any) -> subprocess.Popen[str]:
        started.append(popen(*given, **named))
        return started[-1]

    def kill_in_the_second_chunk(done: int, total: int) -> None:
        calls.append(done)
        if calls == [1, 2, 1]:
            assert total == 2
            started[0].kill()
            started[0].wait()

    monkeypatch.setattr(subprocess, "Popen", start)
    directory.append(messages(MessageIds(1), 400), frame_records=20)
    seen: list[Mapping[str, int]] = []
    with LocalWorkers(1, on_tasks=kill_in_the_second_chunk) as workers:
        with pytest.raises(PipelineError, match=r"ended with code -9 .* Run the job again"):
            follow(workers, small, SignalFlag(), every_s=0.1, on_batch=seen.append)
        committed = rows_of(small)
        assert 0 < committed < 400
        assert [one["messages"] for one in seen] == [committed]
        follow(workers, small, stop, every_s=0.1, on_batch=lambda _: stop.set())
    assert len(started) == 2
    assert sequences(small) == [*range(400)]


def sequences(config: PipelineConfig) -> list[int]:
    """Of all messages that count."""
    lake = Lake(config.tables)
    files = [file for one in lake.ranges(MESSAGES) for file in one.files]
    batches = [
        batch for file in files for batch in lake.read_file(MESSAGES, file.path, ["sequence"])
    ]
    return sorted(number for batch in batches for number in batch["sequence"].to_pylist())
