"""Which messages a replay takes, and that they come as they were, in their order."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace as changed
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pytest

from qmq_client.transport.http import HttpTransport
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import encode_record
from qmq_client.wire.requests import PullRequest
from qmq_pipeline.errors import OptionError
from qmq_pipeline.fold.steps import GroupMark
from qmq_pipeline.jobs.replay import BATCH_BYTES, Order, Target, parse_target, replay
from qmq_pipeline.places.options import Place
from qmq_pipeline.spark.frames import arrow_frame
from qmq_pipeline.tables.schemas import LIFECYCLE
from qmq_pipeline.tables.store import Tables
from tests.kit.broker_process import BrokerProcess
from tests.pipeline.bronze import write_bronze
from tests.pipeline.world import FAR_MS, DataDirectory, messages

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from qmq_pipeline.places.config import PipelineConfig


def write_lives(spark: SparkSession, config: PipelineConfig, lives: list[dict[str, Any]]) -> None:
    """What the job `lifecycle` would have made of them, as far as a replay looks at it."""
    tables = Tables(spark, config.tables)
    rows = [
        dict.fromkeys(LIFECYCLE.names) | {"subject": "orders", "part": 0} | one for one in lives
    ]
    frame = arrow_frame(spark, pa.Table.from_pylist(rows, schema=LIFECYCLE.arrow()))
    tables.replace(frame, LIFECYCLE)
    marks = {f"orders\n{group}": GroupMark().to_json() for group in ("billing", "mail")}
    tables.note_progress("lifecycle", {"marks": marks})
    tables.note_progress("ingest", {})


def order(target: str, **options: Any) -> Order:
    return Order(where="TRUE", target=parse_target(target), name="again", **options)


class PiecemealBroker:
    """Delivers one dead letter again for each request, and says that there is more to each first one."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        asked = self.asked

        class Answering(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                question = json.loads(self.rfile.read(int(self.headers["content-length"])))
                asked.append((question["first"], question["next"]))
                has_more = asked.count(asked[-1]) == 1
                answer = json.dumps({"count": 1, "gone": 0, "has_more": has_more}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: this is no output of a test."""

        self._server = HTTPServer(("127.0.0.1", 0), Answering)
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> PiecemealBroker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def test_a_group_gets_its_own_dead_letters_and_a_subject_each_message_once(
    spark: SparkSession, config: PipelineConfig
) -> None:
    outcomes = [
        ("billing", 0, "dead"),
        ("billing", 1, "acked"),
        ("billing", 2, "dead"),
        ("mail", 0, "acked"),
        ("mail", 1, "dead"),
        ("mail", 2, "acked"),
        (None, None, "cancelled"),
    ]
    lives = [
        {
            "consumer_group": group,
            "sequence": sequence,
            "outcome": outcome,
            "message_id": f"{sequence}",
        }
        for group, sequence, outcome in outcomes
    ]
    write_lives(spark, config, lives)
    found = replay(spark, config, order("group:billing"))
    assert (found.subjects, found.examples) == ({"orders": 2}, ["0", "2"])
    assert replay(spark, config, order("group:mail")).examples == ["1"]
    found = replay(spark, config, order("subject:again"))
    assert (found.messages, found.examples) == (3, ["0", "1", "2"])
    with PiecemealBroker() as broker:
        here = changed(config, place=Place(broker_url=broker.url, wait_s=0.0))
        with pytest.raises(OptionError, match="2 messages are chosen; allowed: 1"):
            replay(spark, here, order("group:billing", limit=1), is_sending=True)
        assert broker.asked == []
        assert replay(spark, here, order("group:billing", limit=2), is_sending=True).sent == 4
    # What is asked for once more is what the broker left of it.
    assert broker.asked == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_messages_come_again_as_they_were_and_in_their_order_in_requests_that_are_not_too_long(
    spark: SparkSession,
    directory: DataDirectory,
    config: PipelineConfig,
    tmp_path: Path,
) -> None:
    """Under their own ids, to the last byte; their ids are in another order than they were stored."""
    plain = messages(MessageIds(1), 5)[::-1]
    long = [msgspec.structs.replace(one, body=bytes(BATCH_BYTES // 2)) for one in plain]
    records = [msgspec.structs.replace(one, expires_at_ms=FAR_MS) for one in long]
    directory.append(records)
    write_bronze(config)
    lives = [
        {"sequence": number, "message_id": record.message_id.hex()}
        for number, record in enumerate(records)
    ]
    write_lives(spark, config, lives)
    steps: list[int] = []
    with BrokerProcess(tmp_path / "other") as broker:
        here = changed(config, place=Place(broker_url=broker.url))
        target = Order(where="TRUE", target=Target(subject="orders"), name="a", with_same_ids=True)
        done = replay(
            spark, here, target, is_sending=True, on_progress=lambda step: steps.append(step.done)
        )
        assert (done.sent, steps) == (5, [1, 2, 3, 4, 5])
        assert received(broker.url) == [encode_record(one) for one in records]


def received(url: str) -> list[bytes]:
    question = PullRequest(
        subject="orders", group="reader", consumer="one", max_messages=100, wait_ms=10_000
    )
    found: list[bytes] = []
    with closing(HttpTransport(url)) as transport:
        while len(found) < 5:
            found += [bytes(one.record) for one in transport.pull(question).messages]
    return found
