"""`qmq message find | show` against a broker of its own process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import build_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import BodyKind, Record, encode_record
from qmq_client.wire.requests import PullRequest, Settlement, SettleRequest
from tests.kit import warm
from tests.kit.broker_process import BrokerProcess

IDS = MessageIds(0xABC)
BORN_AT_MS = 1_357_034_220_000
RECORDS = [
    Record(message_id=IDS.next_id(), subject="flights", body=b"\xff" * 99, born_at_ms=BORN_AT_MS),
    Record(
        message_id=IDS.next_id(),
        subject="flights",
        body="EWR → IAH".encode(),
        body_kind=BodyKind.TEXT,
        key="N14228",
        tags=("severe", "weather"),
        headers=(("trace", "4bf92f35"),),
        born_at_ms=BORN_AT_MS,
    ),
    Record(
        message_id=IDS.next_id(),
        subject="flights",
        body=b'{"flight": 1545}',
        body_kind=BodyKind.JSON,
        key="N14228",
        born_at_ms=BORN_AT_MS,
    ),
]
HEX = [record.message_id.hex() for record in RECORDS]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker that has three messages, of which one group has acked the first."""
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as broker:
        transport = HttpTransport(broker.url)
        for record in RECORDS:
            transport.send(build_message_frame({"flights": [encode_record(record)]}))
        names: dict[str, Any] = {"subject": "flights", "group": "board", "consumer": "one"}
        given = transport.pull(PullRequest(**names, max_messages=2, lease_ms=600_000))
        acks = ((given.head.first_pull_sequence, given.head.first_pull_sequence + 1),)
        settlement = Settlement(token=given.head.token, acks=acks)
        transport.settle(SettleRequest(**names, settlements=(settlement,)))
        transport.close()
        yield broker


def qmq(broker: BrokerProcess | str, *arguments: str) -> subprocess.CompletedProcess[str]:
    url = broker if isinstance(broker, str) else broker.url
    return warm.run(["qmq_client.cli", "message", *arguments, "--broker", url])


def test_a_message_is_listed_by_its_id(broker: BrokerProcess) -> None:
    result = qmq(broker, "find", "--id", HEX[1].upper())
    assert (result.returncode, result.stderr) == (0, "")
    head, row = result.stdout.splitlines()
    assert head.split() == ["stored_at", "message_id", "subject", "sequence", "key", "tags", "body"]
    assert row.split()[1:] == [
        HEX[1],
        "flights",
        "1",
        "N14228",
        "severe,weather",
        *["EWR", "→", "IAH"],
    ]


def test_messages_are_listed_by_key_and_time_newest_first(broker: BrokerProcess) -> None:
    found = ("find", "--subject", "flights", "--key", "N14228")
    assert [row.split()[1] for row in qmq(broker, *found).stdout.splitlines()[1:]] == HEX[2:0:-1]
    limited = qmq(broker, *found, "--limit", "1")
    assert [row.split()[1] for row in limited.stdout.splitlines()[1:]] == [HEX[2]]
    assert "there are more; raise --limit" in limited.stderr
    second = json.loads(qmq(broker, "find", "--id", HEX[2], "--json").stdout)["messages"][0]
    time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=second["stored_at_ms"])
    here = time + timedelta(hours=1)
    for text in (
        time.isoformat(),
        here.isoformat().replace("+00:00", "+01:00"),
        f"{time:%FT%T.%f}",
    ):
        rows = qmq(broker, *found, "--to", text, "--json")
        assert HEX[2] not in [one["message_id"] for one in json.loads(rows.stdout)["messages"]]
        rows = qmq(broker, *found, "--from", text, "--json")
        assert HEX[2] in [one["message_id"] for one in json.loads(rows.stdout)["messages"]]


def test_show_tells_all_that_is_known(broker: BrokerProcess) -> None:
    shown = qmq(broker, "show", HEX[1])
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in shown.stdout.splitlines())
    assert lines["message_id"] == HEX[1]
    assert (lines["subject"], lines["sequence"], lines["key"]) == ("flights", "1", "N14228")
    assert lines["born_at"] == "2013-01-01T09:57:00.000+00:00"
    assert (lines["tags"], lines["header"]) == ("severe, weather", "trace: 4bf92f35")
    assert lines["body"] == "EWR → IAH"
    assert lines["group"].startswith("board: in flight (attempts=1, consumer=one, at=")
    assert int(lines["offset"]) > 0


def test_show_of_bytes_and_of_json(broker: BrokerProcess) -> None:
    of_bytes = qmq(broker, "show", HEX[0]).stdout
    assert f"body       99 bytes {'ff' * 64} …" in of_bytes
    assert "group      board: passed" in of_bytes
    of_json = qmq(broker, "show", HEX[2]).stdout
    assert 'body       {"flight": 1545}' in of_json
    assert "group      board: not yet" in of_json


def test_json_has_what_the_broker_said(broker: BrokerProcess) -> None:
    answer: dict[str, Any] = json.loads(qmq(broker, "show", HEX[2], "--json").stdout)
    (found,) = answer["messages"]
    assert (found["message_id"], found["body"]) == (HEX[2], {"flight": 1545})
    (board,) = found["groups"]
    assert (board["group"], board["state"], board["asked_at_ms"] > 0) == ("board", "not yet", True)
    assert answer["is_complete"]
    assert answer["log_end"] >= answer["indexed_up_to"]


def test_what_is_not_there_is_exit_code_1(broker: BrokerProcess) -> None:
    result = qmq(broker, "show", "0" * 32)
    assert (result.returncode, result.stdout) == (1, "")
    assert "does not wait" in result.stderr
    result = qmq(broker, "find", "--subject", "flights", "--key", "other")
    assert (result.returncode, result.stdout) == (1, "none\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("find",),
        ("find", "--key", "k"),
        ("find", "--id", HEX[0], "--key", "k", "--subject", "flights"),
        ("find", "--id", HEX[0], "--from", "2013-01-01"),
        ("find", "--id", "12"),
        ("find", "--subject", "flights", "--key", "k", "--from", "yesterday"),
        ("find", "--subject", "flights", "--key", "k", "--to", "1969-12-31"),
        ("show", "xyz"),
    ],
)
def test_a_wrong_call_is_exit_code_2_and_no_traceback(
    broker: BrokerProcess, arguments: tuple[str, ...]
) -> None:
    result = qmq(broker, *arguments)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr


def test_a_refusal_and_a_broker_that_is_not_there_have_their_exit_codes(
    broker: BrokerProcess,
) -> None:
    refused = qmq(broker, "find", "--subject", "..", "--key", "k")
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)
    gone = qmq("http://127.0.0.1:9", "show", HEX[0])
    assert (gone.returncode, "Traceback" in gone.stderr) == (3, False)
    assert qmq("nonsense", "show", HEX[0]).returncode == 2


def test_the_index_survives_a_kill_of_the_process(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        transport = HttpTransport(broker.url)
        for record in RECORDS:
            transport.send(build_message_frame({"flights": [encode_record(record)]}))
        transport.close()
        broker.kill()
    with BrokerProcess(tmp_path / "data") as broker:
        for number, text in enumerate(HEX):
            answer = json.loads(qmq(broker, "show", text, "--json").stdout)
            assert [one["sequence"] for one in answer["messages"]] == [number]
            assert answer["is_complete"]
