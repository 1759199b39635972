"""Outboxes are scanned before the log is read, and not at all where it cannot be: a refused call leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from qmq_client.commands.root import root
from qmq_client.signal_flag import SignalFlag
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.answers import ingested_text
from qmq_pipeline.errors import LakeError, SourceError
from qmq_pipeline.jobs.archive import archive
from qmq_pipeline.jobs.follow import follow
from qmq_pipeline.jobs.ingest_both import ingest_both
from qmq_pipeline.jobs.progress import Progress
from qmq_pipeline.jobs.run import run
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import MESSAGES, OUTBOX
from qmq_pipeline.tables.table import Table
from qmq_pipeline.work.workers import LocalWorkers
from tests.kit.broker_process import BrokerProcess
from tests.pipeline.world import FORGETFUL, START_MS, DataDirectory, OutboxDatabase, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = DataDirectory(tmp_path / "broker", FORGETFUL)
    made.append(messages(MessageIds(1), 1500), frame_records=20)
    made.close()
    return made.path


@pytest.fixture
def database(tmp_path: Path) -> Iterator[OutboxDatabase]:
    made = OutboxDatabase(tmp_path / "orders.db")
    made.insert(messages(MessageIds(2), 3), created_at_ms=START_MS)
    yield made
    made.close()


def _follow(workers: LocalWorkers, config: PipelineConfig) -> None:
    follow(workers, config, SignalFlag(), every_s=1.0, on_batch=lambda _: None)


def _run(workers: LocalWorkers, config: PipelineConfig) -> None:
    def no_session() -> SparkSession:
        raise AssertionError("nothing is to be made of a log that is refused")

    run(no_session, config, workers=workers)


@pytest.mark.parametrize("job", [ingest_both, _follow, _run])
def test_an_archive_and_a_folder_without_a_log_are_refused_before_rows_are_written(
    job: Callable[[LocalWorkers, PipelineConfig], object],
    directory: Path,
    database: OutboxDatabase,
    tmp_path: Path,
) -> None:
    place, kept = Place(path=str(directory)), str(tmp_path / "archive")
    with LocalWorkers(1) as workers:
        archive(workers, PipelineConfig(tables=kept, place=place))
        known = (database.section,)
        with pytest.raises(LakeError, match="it is an archive"):
            job(workers, PipelineConfig(tables=kept, place=place, databases=known))
        assert Lake(kept).ranges(OUTBOX) == []
        elsewhere = PipelineConfig(
            tables=str(tmp_path / "tables"), place=Place(path=str(tmp_path)), databases=known
        )
        with pytest.raises(SourceError, match="no data directory"):
            job(workers, elsewhere)
    assert not (tmp_path / "tables").exists()


def test_P4_what_an_outbox_shows_as_sent_is_in_the_log_that_is_read_behind_it(
    database: OutboxDatabase, tmp_path: Path, workers: LocalWorkers
) -> None:
    """A message is committed and sent between the two: else it would look like one that was lost."""
    directory = DataDirectory(tmp_path / "log")
    directory.append(messages(MessageIds(2), 3))
    config = PipelineConfig(
        tables=str(tmp_path / "tables"),
        place=Place(path=str(directory.path)),
        databases=(database.section,),
    )
    late = messages(MessageIds(3), 1)

    def on_progress(_: Progress) -> None:
        sent = [late.pop()] if late else []
        database.insert(sent, created_at_ms=START_MS)
        directory.append(sent)

    ingest_both(workers, config, on_progress=on_progress)
    assert ids_in(config, OUTBOX) < ids_in(config, MESSAGES)
    directory.close()


def ids_in(config: PipelineConfig, table: Table) -> set[str]:
    lake = Lake(config.tables)
    return {
        found
        for one in lake.ranges(table)
        for file in one.files
        for batch in lake.read_file(table, file.path, ["message_id"])
        for found in batch["message_id"].to_pylist()
    }


def test_what_came_in_is_told_and_if_nothing_did_where_that_was_looked_for(
    directory: Path, database: OutboxDatabase, tmp_path: Path
) -> None:
    tables = ("--tables", str(tmp_path / "tables"), "--quiet")
    log, rows = ("--path", str(directory)), ("--database", database.section.url)

    def said(*arguments: str) -> str:
        done = CliRunner().invoke(root, ["pipeline", "ingest", *tables, *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout.rpartition(" (")[0]

    assert said(*log) == "ingested 1,500 messages"
    assert said(*log) == f"nothing new in the logs of {directory}"
    assert said(*rows) == "ingested 3 outbox rows"
    empty = OutboxDatabase(tmp_path / "shop.db")
    empty.close()
    other = ("--database", empty.section.url)
    assert said(*other) == "nothing new in the outbox of shop"
    assert said(*log, *other) == f"nothing new in the logs of {directory} and the outbox of shop"


def test_of_many_databases_without_news_the_number_is_told(database: OutboxDatabase) -> None:
    for count, outboxes in ((2, "the outbox of orders and of orders"), (4, "4 outboxes")):
        config = PipelineConfig(tables="t", databases=(database.section,) * count)
        assert ingested_text({"outbox": 0}, config) == f"nothing new in {outboxes}"


@pytest.mark.parametrize("is_in_file", [True, False])
def test_the_configured_broker_is_read_unless_a_directory_is_named(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_file: bool
) -> None:
    tables = f"--tables {tmp_path / 'tables'}"
    monkeypatch.chdir(tmp_path)
    with BrokerProcess(tmp_path / "other") as broker:
        if is_in_file:
            Path("qmq.toml").write_text(f'[broker]\nurl = "{broker.url}"\n')
        else:
            monkeypatch.setenv("QMQ_BROKER_URL", broker.url)
        # An option that needs a broker has one
        done = _qmq(f"ingest {tables} --wait 5 --quiet")
        assert (done.exit_code, broker.url in done.stdout) == (0, True), done.output
        beside = _qmq(f"ingest --tables {tmp_path / 'of-directory'} --path {directory} --quiet")
        assert "1,500 messages" in beside.stdout, beside.output
        refused = _qmq(f"ingest {tables} --path {directory} --wait 5")
        assert (refused.exit_code, "--wait needs --broker" in refused.stderr) == (2, True)


def test_P4_an_audit_that_has_no_log_to_judge_by_is_not_clean(
    database: OutboxDatabase, tmp_path: Path
) -> None:
    tables = f"--tables {tmp_path / 'tables'}"
    read = _qmq(f"ingest {tables} --database {database.section.url} --quiet")
    assert (read.exit_code, "3 outbox rows" in read.stdout) == (0, True), read.output
    done = _qmq(f"audit {tables} --quiet")
    assert (done.exit_code, done.stdout.startswith("NOT JUDGED: 0 lost")) == (1, True), done.output
    assert "no log was ingested" in done.stdout
    assert "judged as of no time: 0 committed, 0 stored" in done.stdout


def _qmq(arguments: str) -> Result:
    return CliRunner().invoke(root, ["pipeline", *arguments.split()], catch_exceptions=False)
