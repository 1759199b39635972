"""`qmq pipeline` beside a running broker and an application's database, and what it says of bad input."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result

from qmq_client.commands.root import root
from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.outbox.table import create_tables
from qmq_client.producer import Producer
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.deliveries import Delivered
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import record_message_id
from qmq_client.wire.requests import PullRequest, Reject, Settlement, SettleRequest
from qmq_pipeline.command import running_job
from qmq_pipeline.spark.explain import explain
from qmq_pipeline.spark.session import log_path
from qmq_pipeline.tables.schemas import LIFECYCLE
from qmq_pipeline.tables.store import Tables
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import wait_for
from tests.pipeline.world import DataDirectory, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COUNT = 40
QUIET = {
    "config_file": None,
    "quiet": True,
    "as_json": False,
    "table_format": "parquet",
    "namespace": "",
}


def qmq(*arguments: str | Path) -> Result:
    return CliRunner().invoke(root, [str(one) for one in arguments], catch_exceptions=False)


def answer(*arguments: str | Path) -> Any:
    result = qmq(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("error", "is_kept"), [(None, False), (SystemExit(1), False), (ValueError("damaged"), True)]
)
def test_the_log_of_java_stays_only_when_an_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, is_kept: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    given = {"tables": str(tmp_path), "path": None, "broker_url": None, "databases": ()}
    with contextlib.suppress(SystemExit), running_job({**given, **QUIET}):
        log_path().write_text("what Java said")
        if error is not None:
            raise error
    assert log_path().exists() is is_kept


def test_the_life_of_messages_from_commit_to_replay_through_the_commands(
    spark: SparkSession, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    engine = sa.create_engine(url)
    create_tables(engine)
    tables = ("--tables", tmp_path / "tables")
    with BrokerProcess(tmp_path / "broker") as broker:
        here = (*tables, "--broker", broker.url, "--database", url)
        options = ProducerOptions(keep_sent_s=3600)
        with (
            Producer(engine, broker.url, options=options) as producer,
            engine.begin() as connection,
        ):
            for number in range(COUNT):
                producer.send(Message("orders", body={"number": number}), session=connection)
        engine.dispose()
        dead = _consume_all_but_one_rejected(broker.url)
        # What was sent in the last second may not be durable by what the files say; so two looks.
        wait_for(
            lambda: _settled(spark, tmp_path, here) == COUNT, "not all were settled", within_s=120
        )
        audited = answer("pipeline", "audit", *here, "--grace", "0", "--rows-kept")
        assert audited["findings"] == dict.fromkeys(audited["findings"], 0)
        assert audited["committed"] == COUNT
        where = ("--where", "outcome = 'dead'", "--to", "subject:orders.again", "--name", "again")
        planned = answer("pipeline", "replay", *here, *where)
        assert (planned["messages"], planned["sent"], planned["examples"]) == (1, 0, [dead])
        assert answer("pipeline", "replay", *here, *where, "--send")["sent"] == 1
        again = answer("pipeline", "replay", *here, *where, "--send")
        assert (again["sent"], again["repeated"]) == (0, 1)
        # Under its own id it is the same message: a broker that has it still drops it, and others get it as it was.
        same = ("--where", "outcome = 'dead'", "--send", "--same-ids", "--to")
        again = answer("pipeline", "replay", *here, *same, "subject:orders")
        assert (again["sent"], again["repeated"]) == (0, 1)
        other = answer("pipeline", "replay", *here, *same, "subject:orders.other")
        assert (other["sent"], other["repeated"]) == (1, 0)  # an id counts within its subject
        to_group = ("--where", "TRUE", "--to", "group:billing", "--send")
        assert answer("pipeline", "replay", *here, *to_group)["sent"] == 1
        for send in ((), ("--send",)):
            wrong = ("--where", "TRUE", "--to", "group:biling", *send, "--quiet")
            refused = qmq("pipeline", "replay", *here, *wrong)
            assert (refused.exit_code, refused.stdout) == (2, "")
            told = "--to: the tables know no group biling; allowed: billing. Did you mean billing?"
            assert told in refused.stderr
        transport = HttpTransport(broker.url)
        pulled = transport.pull(_pull("orders", "billing"))
        assert [_id(one) for one in pulled.messages] == [dead]
        transport.close()


def _pull(subject: str, group: str) -> PullRequest:
    return PullRequest(subject=subject, group=group, consumer="c1", max_messages=100, wait_ms=5000)


def _id(delivered: Delivered) -> str:
    return record_message_id(delivered.record).hex()


def _consume_all_but_one_rejected(url: str) -> str:
    """Pull everything, ack it, but make one message a dead letter; its id."""
    transport = HttpTransport(url)
    seen, dead = 0, ""
    while seen < COUNT:
        pulled = transport.pull(_pull("orders", "billing"))
        first, after = pulled.head.first_pull_sequence, len(pulled.messages)
        after += first
        seen += after - first
        rejects: tuple[Reject, ...] = ()
        if not dead:
            dead = _id(pulled.messages[0])
            rejects = (Reject(range=(first, first + 1), reason="no such customer"),)
            first += 1
        settlement = Settlement(
            token=pulled.head.token,
            acks=((first, after),) if first < after else (),
            rejects=rejects,
        )
        transport.settle(
            SettleRequest(
                subject="orders", group="billing", consumer="c1", settlements=(settlement,)
            )
        )
    transport.close()
    return dead


def _settled(spark: SparkSession, tmp_path: Path, here: tuple[str | Path, ...]) -> int:
    answer("pipeline", "ingest", *here)
    answer("pipeline", "lifecycle", *here)
    rows = Tables(spark, str(tmp_path / "tables")).read(LIFECYCLE)
    return rows.where("outcome IN ('acked', 'dead')").count()


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        (("ingest", "--path", "/nowhere/at/all"), 2, "no such directory"),
        (("ingest", "--broker", "http://127.0.0.1:1", "--wait", "0"), 3, "does not answer"),
        (("ingest", "--broker", "nonsense"), 2, "http"),
        (("ingest",), 2, "--path or --broker"),
        (("ingest", "--path", "a", "--broker", "b"), 2, "one of the two"),
        (("ingest", "--colour", "red"), 2, "No such option"),
        (("audit", "--since", "yesterday"), 2, "2026-01-31"),
        (("audit",), 2, "spelling of --tables"),
        (("lifecycle",), 2, "no tables here"),
        (("report",), 2, "no tables here"),
        (("replay", "--where", "TRUE", "--to", "orders"), 2, "subject:NAME"),
        (("replay", "--where", "TRUE", "--to", "group:a"), 2, "run `ingest` and `lifecycle` first"),
        (("replay", "--where", "colour = 1", "--to", "subject:a"), 2, "colour"),
        (("replay", "--where", "outcome ==== 1", "--to", "subject:a"), 2, "SYNTAX_ERROR"),
    ],
    ids=lambda one: one[0] if isinstance(one, tuple) and len(one) == 1 else None,
)
def test_bad_input_is_one_line_that_says_what_and_what_to_do(
    spark: SparkSession,
    tmp_path: Path,
    arguments: tuple[str, ...],
    exit_code: int,
    says: str,
) -> None:
    if "--where" in arguments:  # what is asked of tables is asked where some are
        Tables(spark, str(tmp_path / "tables")).note_progress("ingest", {})
    result = qmq("pipeline", arguments[0], "--tables", tmp_path / "tables", *arguments[1:])
    assert result.exit_code == exit_code, result.output
    assert "--where" in arguments or not (tmp_path / "tables").exists()
    lines = [line for line in result.stderr.splitlines() if line.strip("\r \x1b[K")]
    assert says in lines[-1]
    assert "Traceback" not in result.output
    assert "at org.apache" not in result.output
    if arguments[1:] != ("--colour", "red"):
        assert len(lines) == 1


def test_damage_is_one_line_with_file_and_offset(spark: SparkSession, tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 200))
    directory.close()
    path = directory.path / "commitlog" / f"{0:020d}"
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xff\xff\xff")
    result = qmq("pipeline", "ingest", "--tables", tmp_path / "t", "--path", directory.path)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()[-1:]
    assert "commitlog/00000000000000000000" in line
    assert "offset" in line
    assert "qmq store verify" in line


def test_what_spark_says_in_250_lines_becomes_one() -> None:
    text = (
        "An error occurred while calling o123.collectToPython.\n: org.apache.spark.SparkException: Job\n"
        '  File "/x/y.py", line 3, in read\nqmq_pipeline.errors.OptionError: option a: b; allowed: c. D\n'
        "\tat org.apache.spark.api.python.BasePythonRunner\n" + "\tat java.base\n" * 200
    )
    told = explain(RuntimeError(text), "jvm.log")
    assert (type(told).__name__, str(told)) == ("OptionError", "option a: b; allowed: c. D")
    foreign = explain(RuntimeError("boom\nValueError: bad thing\n\tat java"), "jvm.log")
    assert "ValueError: bad thing" in str(foreign)
    assert "jvm.log" in str(foreign)


def test_of_the_bridge_to_the_jvm_the_exception_is_reported_and_not_the_call() -> None:
    said = "An error occurred while calling o53.load.\n: java.io.IOException: no such program.\n\tat java"
    told = str(explain(RuntimeError(said), "jvm.log"))
    assert told.startswith("Spark failed: java.io.IOException: no such program. Details")
