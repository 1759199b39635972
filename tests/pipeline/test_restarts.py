"""The pipeline beside a broker that comes and goes: it goes on, and every row is there once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.signal_flag import SignalFlag
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import build_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import encode_record
from qmq_pipeline.errors import ExpiredRangeError, SourceError, UnreachableError
from qmq_pipeline.jobs.archive import archive
from qmq_pipeline.jobs.follow import follow
from qmq_pipeline.jobs.ingest import ingest
from qmq_pipeline.jobs.progress import Progress
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.options import Place, parse_log_options
from qmq_pipeline.places.outage_notices import NOTICES, OutageNotice
from qmq_pipeline.sources.log_partitions import LogPartition
from qmq_pipeline.sources.log_stream import LogStreamReader
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import MESSAGES
from qmq_pipeline.work.workers import LocalWorkers
from tests.kit.broker_process import BrokerProcess
from tests.pipeline.fraying import FrayingLine
from tests.pipeline.quick import quick_environment
from tests.pipeline.world import FORGETFUL, DataDirectory, messages

#: More than a broker takes to start on the busiest machine.
WAIT_S = 300.0
COUNT = 8000
FOR_EVER = ("--retain-hours", "800000", "--reserve-bytes", "0")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Some sealed segments, and one that is not."""
    directory = DataDirectory(tmp_path / "broker", FORGETFUL)
    directory.append(messages(MessageIds(1), COUNT), frame_records=20)
    directory.close()
    return directory.path


@contextmanager
def told() -> Iterator[list[OutageNotice]]:
    """What is told of outages."""
    found: list[OutageNotice] = []
    with NOTICES.told_to(found.append):
        yield found


def stop(broker: BrokerProcess) -> None:
    broker.stop()


def kill(broker: BrokerProcess) -> None:
    broker.kill()


class Restarting:
    """Ends a broker when it is called first, and starts it again once that was noticed, and not before."""

    def __init__(self, broker: BrokerProcess, end: Callable[[BrokerProcess], None]) -> None:
        self._broker = broker
        self._end = end
        self.notices: list[OutageNotice] = []
        self.is_done = False

    def end_once(self) -> None:
        if not self.is_done:
            self.is_done = True
            self._end(self._broker)

    def on_progress(self, _: Progress) -> None:
        self.end_once()

    def on_notice(self, notice: OutageNotice) -> None:
        self.notices.append(notice)
        if notice.reason:
            self._broker.start()

    @property
    def are_told_once(self) -> bool:
        """Whether there was one outage, and its end."""
        return [bool(one.reason) for one in self.notices] == [True, False]


def sequences(tables: str) -> list[int]:
    """Of all messages that count."""
    lake, found = Lake(tables), list[int]()
    for one in lake.ranges(MESSAGES):
        for file in one.files:
            path = Path(tables) / MESSAGES.layer / MESSAGES.name / file.path
            found += pq.read_table(path, partitioning=None)["sequence"].to_pylist()
    return sorted(found)


def send(broker: BrokerProcess, ids: MessageIds, count: int) -> None:
    with closing(HttpTransport(broker.url)) as transport:
        rows = messages(ids, count)
        transport.send(build_message_frame({"orders": [encode_record(one) for one in rows]}))


def test_a_line_that_breaks_again_and_again_brings_a_log_whole_and_little_of_it_twice(
    tmp_path: Path,
) -> None:
    directory = DataDirectory(tmp_path / "broker")
    body = os.urandom(16_000)
    directory.append(
        [msgspec.structs.replace(one, body=body) for one in messages(MessageIds(1), 1250)],
        frame_records=50,
    )
    log_bytes = directory.store.durable_offset
    directory.close()
    assert log_bytes > 20_000_000
    with BrokerProcess(directory.path, *FOR_EVER) as broker, told() as notices:
        for seed in (1, 2):
            with FrayingLine(broker.port, seed=seed) as line, LocalWorkers(2) as workers:
                place = Place(broker_url=line.url, wait_s=WAIT_S)
                config = PipelineConfig(tables=str(tmp_path / f"tables{seed}"), place=place)
                ingest(workers, config)
            assert sequences(config.tables) == list(range(1250))
            assert line.breaks > log_bytes / 200_000
            assert line.passed_bytes < 1.1 * log_bytes, f"seed {seed}"
    assert notices == [], "nobody waited for anything"


@pytest.mark.parametrize("end", [stop, kill])
def test_P2_a_broker_that_restarts_in_the_middle_of_an_ingest_is_waited_for(
    data: Path, tmp_path: Path, end: Callable[[BrokerProcess], None]
) -> None:
    with BrokerProcess(data, *FOR_EVER) as broker, LocalWorkers(2) as workers:
        config = PipelineConfig(
            tables=str(tmp_path / "tables"),
            place=Place(broker_url=broker.url, wait_s=WAIT_S),
            partition_bytes=65_536,
            ranges_per_commit=2,
        )
        world = Restarting(broker, end)
        with NOTICES.told_to(world.on_notice):
            done = ingest(workers, config, on_progress=world.on_progress)
    assert (done.rows["messages"], sequences(config.tables)) == (COUNT, list(range(COUNT)))
    assert world.are_told_once, world.notices


def test_P2_a_broker_that_restarts_in_the_middle_of_an_archive_is_waited_for(
    data: Path, tmp_path: Path
) -> None:
    with BrokerProcess(data, *FOR_EVER) as broker, LocalWorkers(2) as workers:
        place = Place(broker_url=broker.url, wait_s=WAIT_S)
        config = PipelineConfig(tables=str(tmp_path / "archive"), place=place)
        world = Restarting(broker, kill)
        with NOTICES.told_to(world.on_notice):
            done = archive(workers, config, on_progress=world.on_progress)
        again = archive(workers, config)
    assert done.segments > 8, "more than one commit"
    assert (done.verified, done.keeper, again.segments) == (done.messages, "archive", 0)
    assert sequences(config.tables) == list(range(done.messages))
    assert world.are_told_once, world.notices


def test_P2_who_follows_a_broker_goes_on_when_it_is_back_however_short_the_wait_at_the_start(
    data: Path, tmp_path: Path
) -> None:
    flag, batches = SignalFlag(), list[int]()
    with BrokerProcess(data, *FOR_EVER) as broker, LocalWorkers(1) as workers:
        place = Place(broker_url=broker.url, wait_s=0)
        config = PipelineConfig(tables=str(tmp_path / "tables"), place=place)
        world = Restarting(broker, kill)

        def on_notice(notice: OutageNotice) -> None:
            world.on_notice(notice)
            if notice.reason:
                send(broker, MessageIds(2), 20)

        def on_batch(rows: Mapping[str, int]) -> None:
            batches.append(rows["messages"])
            if sum(batches) == COUNT + 20:
                flag.set()
            world.end_once()

        with NOTICES.told_to(on_notice):
            done = follow(workers, config, flag, every_s=0.1, on_batch=on_batch)
    assert batches == [COUNT, 20]
    assert (done.batches, done.rows["messages"]) == (2, COUNT + 20)
    assert sequences(config.tables) == list(range(COUNT + 20))
    assert world.are_told_once, world.notices
    assert world.notices[0].wait_s is None


def test_a_batch_that_a_broker_broke_off_is_counted_as_far_as_it_was_committed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages come before actions: between the two the broker goes away."""
    flag, batches = SignalFlag(), list[int]()
    with BrokerProcess(data, *FOR_EVER) as broker, LocalWorkers(1) as workers:
        place = Place(broker_url=broker.url, wait_s=WAIT_S)
        config = PipelineConfig(tables=str(tmp_path / "tables"), place=place)
        world = Restarting(broker, kill)
        write_state = Lake.write_state

        def write_and_kill(lake: Lake, *given: Any) -> None:
            write_state(lake, *given)
            world.end_once()

        def on_batch(rows: Mapping[str, int]) -> None:
            batches.append(rows.get("messages", 0))
            if world.notices:
                flag.set()

        monkeypatch.setattr(Lake, "write_state", write_and_kill)
        with NOTICES.told_to(world.on_notice):
            done = follow(workers, config, flag, every_s=0.1, on_batch=on_batch)
    assert (batches, done.rows["messages"]) == ([COUNT, 0], COUNT)


def test_a_first_run_waits_from_when_the_broker_goes_away_and_anew_after_what_it_brought(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour before each of two outages, where no more than minutes are waited for."""
    flag, batches, clock = SignalFlag(), list[int](), HoursLater()
    with BrokerProcess(data, *FOR_EVER) as broker, LocalWorkers(1) as workers:
        place = Place(broker_url=broker.url, wait_s=WAIT_S)
        config = PipelineConfig(tables=str(tmp_path / "tables"), place=place)
        world = Restarting(broker, kill)

        def kill_after(name: str, hours: int) -> None:
            method = getattr(Lake, name)

            def called(lake: Lake, *given: Any) -> None:
                method(lake, *given)
                if clock.hours == hours - 1:
                    clock.hours = hours
                    broker.kill()

            monkeypatch.setattr(Lake, name, called)

        def on_batch(rows: Mapping[str, int]) -> None:
            batches.append(rows.get("messages", 0))
            if len(batches) == 2:
                flag.set()

        kill_after("prepare", 1)  # nothing has come then
        kill_after("write_state", 2)  # messages have come, and no actions
        with NOTICES.told_to(world.on_notice):
            follow(workers, config, flag, every_s=0.1, on_batch=on_batch, clock=clock)
    assert (batches, clock.hours) == ([COUNT, 0], 2)
    assert [bool(one.reason) for one in world.notices] == [True, False, True, False]


class HoursLater:
    """The clock of the system, so many hours ahead."""

    def __init__(self) -> None:
        self.hours = 0

    def now_ms(self) -> int:
        return SYSTEM_CLOCK.now_ms()

    def monotonic_s(self) -> float:
        return SYSTEM_CLOCK.monotonic_s() + 3_600 * self.hours

    def sleep(self, seconds: float) -> None:
        SYSTEM_CLOCK.sleep(seconds)


def test_a_signal_ends_the_wait_for_a_broker_at_once(data: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "qmq_client", "pipeline", "ingest", "--follow"]
    with BrokerProcess(data, *FOR_EVER) as broker:
        there = ["--tables", str(tmp_path / "tables"), "--broker", broker.url]
        process = subprocess.Popen(
            [*command, *there, "--every", "0.1", "--wait", "0", "--json"],
            env=quick_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        assert msgspec.json.decode(process.stdout.readline())["rows"]["messages"] == COUNT
        broker.kill()
        line = process.stderr.readline()
        assert "does not answer" in line
        assert line.endswith("; waiting for it\n"), "without end"
        process.send_signal(signal.SIGTERM)
        said, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    assert msgspec.json.decode(said)["batches"] == 1


def test_who_follows_waits_for_a_broker_that_never_was_there_as_long_as_was_said(
    config: PipelineConfig,
) -> None:
    nowhere = replace(config, place=Place(broker_url="http://127.0.0.1:1", wait_s=1.5))
    with told() as notices, LocalWorkers(1) as workers, pytest.raises(UnreachableError):
        follow(workers, nowhere, SignalFlag(), every_s=0.1, on_batch=print)
    assert [one.wait_s for one in notices] == [1.5]
    assert not Path(config.tables).exists()


def test_P1_a_streaming_query_outlasts_a_restart_between_any_two_of_its_steps(
    data: Path,
) -> None:
    with BrokerProcess(data, *FOR_EVER) as broker:
        given = {"broker_url": broker.url, "columns": "sequence", "waitS": "300"}
        reader = LogStreamReader(parse_log_options(given))
        start = reader.initialOffset()
        seen = Counter[int]()

        def restarted() -> None:
            world = Restarting(broker, kill)
            stack.enter_context(NOTICES.told_to(world.on_notice))
            world.end_once()

        with ExitStack() as stack:
            restarted()
            here = reader.latestOffset(start, ReadAllAvailable())
            restarted()
            parts = reader.partitions(start, here)
            restarted()
            for part in parts:
                assert isinstance(part, LogPartition)
                for batch in reader.read(part):
                    seen.update(batch.column(0).to_pylist())
        reader.stop()
    assert seen == Counter(range(COUNT))


def test_what_retention_has_passed_and_another_store_at_the_address_are_not_waited_for(
    tmp_path: Path,
) -> None:
    directory = DataDirectory(tmp_path / "broker", FORGETFUL)
    directory.append(messages(MessageIds(1), 400))
    directory.close()
    with BrokerProcess(directory.path, *FOR_EVER) as broker, LocalWorkers(1) as workers:
        config = PipelineConfig(
            tables=str(tmp_path / "tables"), place=Place(broker_url=broker.url, wait_s=WAIT_S)
        )
        ingest(workers, config)
        broker.stop()
        directory.open()
        directory.append(messages(MessageIds(2), COUNT), frame_records=20)
        directory.forget(segments=3)
        directory.close()
        broker.start()
        with told() as notices, pytest.raises(ExpiredRangeError):
            ingest(workers, config)
        broker.stop()
        directory.path.rename(tmp_path / "old")
        DataDirectory(directory.path, FORGETFUL).close()
        broker.start()
        with told() as more, pytest.raises(SourceError, match=r"the tables in \S+ are of store"):
            ingest(workers, config)
    assert notices == more == []
