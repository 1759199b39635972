"""A replay while the broker comes and goes: every message once, and a name to go on with."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from qmq_client.transport.http import HttpTransport
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import record_message_id
from qmq_client.wire.requests import PullRequest
from qmq_pipeline.errors import UnreachableError
from qmq_pipeline.jobs.lifecycle import lifecycle
from qmq_pipeline.jobs.progress import Progress
from qmq_pipeline.jobs.replay import BATCH_RECORDS, Order, Target, replay
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.options import Place
from tests.faults.proxy import Proxy
from tests.kit.broker_process import BrokerProcess
from tests.pipeline.bronze import write_bronze
from tests.pipeline.world import DataDirectory, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COUNT = 2 * BATCH_RECORDS + 100
ORDER = Order(where="TRUE", target=Target(subject="again"), name="second-try")


def test_P2_a_replay_outlasts_an_answer_that_is_lost_and_a_broker_that_is_killed(
    spark: SparkSession, directory: DataDirectory, tmp_path: Path
) -> None:
    directory.append(messages(MessageIds(1), COUNT))
    here = PipelineConfig(tables=str(tmp_path / "tables"), place=Place(path=str(directory.path)))
    write_bronze(here)
    lifecycle(spark, here)
    steps: list[int] = []
    with BrokerProcess(tmp_path / "other") as broker, Proxy(broker.port) as line:

        def config(wait_s: float) -> PipelineConfig:
            place = Place(broker_url=f"http://127.0.0.1:{line.port}", wait_s=wait_s)
            return PipelineConfig(tables=here.tables, place=place)

        def on_progress(progress: Progress) -> None:
            steps.append(progress.done)
            if len(steps) == 1:
                line.cut_at("answers", 0)  # the next batch is stored, and nobody hears of it
            elif len(steps) == 2:
                broker.kill()

        def on_log(record: logging.LogRecord) -> bool:
            if "waiting for it" in record.getMessage():
                (line.heal if len(steps) == 1 else broker.start)()
            return True

        log = logging.getLogger("qmq.pipeline")
        log.addFilter(on_log)
        try:
            done = replay(spark, config(300), ORDER, is_sending=True, on_progress=on_progress)
        finally:
            log.removeFilter(on_log)
        assert steps == [BATCH_RECORDS, 2 * BATCH_RECORDS, COUNT]
        assert (done.sent, done.repeated) == (COUNT - BATCH_RECORDS, BATCH_RECORDS)
        there = ids(broker)
        assert len(there) == len(set(there)) == COUNT
        line.cut()
        with pytest.raises(UnreachableError, match="--name second-try"):
            replay(spark, config(0), ORDER, is_sending=True)
        line.heal()
        again = replay(spark, config(0), ORDER, is_sending=True)
        assert (again.sent, again.repeated) == (0, COUNT)


def ids(broker: BrokerProcess) -> list[bytes]:
    """Of everything that came to the subject."""
    found: list[bytes] = []
    group = f"reader{broker.port}"
    with closing(HttpTransport(broker.url)) as transport:
        while True:
            question = PullRequest(
                subject="again", group=group, consumer="one", max_messages=1000, wait_ms=100
            )
            pulled = transport.pull(question).messages
            if not pulled:
                return found
            found += [record_message_id(one.record) for one in pulled]
