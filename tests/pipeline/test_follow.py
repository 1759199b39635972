"""`qmq pipeline ingest --follow`: news come into the tables until a signal ends it, cleanly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import IO, TYPE_CHECKING

import pytest

from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.errors import LakeError
from qmq_pipeline.jobs.follow import follow
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import MESSAGES
from tests.pipeline.gold import pulled
from tests.pipeline.quick import quick_environment
from tests.pipeline.world import DataDirectory, messages

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

START = "import sys; from qmq_client.commands.root import root; root(sys.argv[1:])"


def test_what_comes_into_both_logs_comes_into_the_tables_until_it_is_stopped(
    spark: SparkSession, tmp_path: Path
) -> None:
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 30))
    config = PipelineConfig(tables=str(tmp_path / "tables"), place=Place(path=str(directory.path)))
    stop = Event()
    seen: list[Mapping[str, int]] = []

    def on_batch(rows: Mapping[str, int]) -> None:
        seen.append(rows)
        if len(seen) == 1:  # this is the end of the first look; the streams begin behind it
            directory.append(messages(MessageIds(2), 20))
        elif sum(one.get("actions", 0) for one in seen):
            stop.set()
        elif sum(one.get("messages", 0) for one in seen) == 50:
            directory.act([pulled(0, 5, directory.clock.now_ms())])

    done = follow(spark, config, stop, every_s=0.1, on_batch=on_batch)
    assert (done.rows["messages"], done.rows["actions"]) == (50, 1)
    assert Lake(config.tables).read(spark, MESSAGES).count() == 50
    assert not spark.streams.active
    directory.close()


def test_an_error_on_the_way_ends_it_and_is_raised_as_it_was(
    spark: SparkSession, tmp_path: Path
) -> None:
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 10))
    config = PipelineConfig(tables=str(tmp_path / "tables"), place=Place(path=str(directory.path)))

    def on_batch(_: Mapping[str, int]) -> None:
        (tmp_path / "tables" / "LAKE").write_text('{"version": 9}')
        directory.append(messages(MessageIds(2), 10))

    with pytest.raises(LakeError, match="version 9"):
        follow(spark, config, Event(), every_s=0.1, on_batch=on_batch)
    assert not spark.streams.active
    directory.close()


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


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("spark")
def test_ctrl_c_ends_the_command_with_all_committed_and_exit_code_0(tmp_path: Path) -> None:
    """What a terminal does: SIGINT for the whole group of processes, the JVM and its workers among them."""
    directory = DataDirectory(tmp_path / "broker")
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
        env=quick_environment(),
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
    directory.close()


def _next(output: IO[str]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = json.loads(output.readline())
    return found
