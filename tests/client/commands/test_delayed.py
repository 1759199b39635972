"""`qmq delayed` against a real broker, and the page about delayed messages, which is one program."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from qmq_client.commands.delayed import delayed
from qmq_client.commands.message import message as messages
from qmq_client.ids import MESSAGE_IDS
from qmq_client.message import Message, message_to_record
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import FrameKind, build_message_frame
from qmq_client.wire.record import encode_record
from tests.kit.broker_process import ROOT, BrokerProcess
from tests.kit.waiting import DEADLINE_S
from tests.tidy.markdown import blocks
from tests.tidy.readme_blocks import DOCUMENTED_ADDRESS

PAGE = ROOT / "docs" / "delay.md"
RUN_S_MAX = 60


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "broker") as process:
        yield process


def later(**much: int) -> datetime:
    """Than now."""
    return datetime.now(UTC) + timedelta(**much)


def send(url: str, *messages: Message) -> list[str]:
    now_ms = round(datetime.now(UTC).timestamp() * 1000)
    records: dict[str, list[bytes]] = {}
    ids = []
    for message in messages:
        record = message_to_record(message, new_id=MESSAGE_IDS.next_id(), now_ms=now_ms)
        ids.append(record.message_id.hex())
        records.setdefault(message.subject, []).append(encode_record(record))
    transport = HttpTransport(url)
    transport.send(build_message_frame(records, kind=FrameKind.DELAYED))
    transport.close()
    return ids


def run(url: str, *arguments: str, code: int = 0) -> Any:
    ran = CliRunner().invoke(delayed, [*arguments, "--broker", url, "--json"])
    assert ran.exit_code == code, ran.output
    return json.loads(ran.stdout)


def test_what_waits_is_listed_shown_cancelled_and_put_off(broker: BrokerProcess) -> None:
    url = f"http://{broker.host}:{broker.port}"
    start = datetime.now(UTC)
    hours = [Message("gate", {"n": n}, deliver_at=start + timedelta(hours=n)) for n in (3, 1, 2)]
    third, first, second = send(url, *hours)
    (other,) = send(url, Message("seat", "x", deliver_at=start + timedelta(days=30)))
    listed = run(url, "list")["delayed"]
    assert [one["message_id"] for one in listed] == [first, second, third, other]
    assert [one["message_id"] for one in run(url, "list", "--subject", "seat")["delayed"]] == [
        other
    ]
    assert run(url, "list", "--limit", "1")["has_more"]
    late = (start + timedelta(hours=2, minutes=30)).isoformat()
    assert len(run(url, "list", "--from", late)["delayed"]) == 2
    assert sum(row["count"] for row in run(url, "histogram", "--span", "day")["rows"]) == 4
    shown = run(url, "show", first)
    assert [one["message"]["body"] for one in shown["messages"]] == [{"n": 1}]
    assert [place["state"] for place in shown["places"]] == ["pending"]
    moved = (start + timedelta(days=3)).isoformat()
    assert run(url, "reschedule", first, moved) == {"outcomes": {first: "rescheduled"}}
    states = [place["state"] for place in run(url, "show", first)["places"]]
    assert states == ["rescheduled", "pending"]
    assert run(url, "cancel", first, second)["outcomes"] == {
        first: "cancelled",
        second: "cancelled",
    }
    assert run(url, "reschedule", first, moved, code=1) == {"outcomes": {first: "cancelled"}}
    assert run(url, "cancel", "0" * 32, code=1)["outcomes"] == {"0" * 32: "unknown"}
    status = run(url, "status")
    assert (status["pending"], status["subjects"]) == (2, {"gate": 1, "seat": 1})
    assert [one["message_id"] for one in run(url, "list")["delayed"]] == [third, other]


def test_for_people_there_are_tables_and_bars(broker: BrokerProcess) -> None:
    url = f"http://{broker.host}:{broker.port}"
    (message_id,) = send(url, Message("gate", "body", deliver_at=later(hours=3)))
    for command, said in {
        "list": "gate",
        f"show {message_id}": "body",
        "histogram": "█",
        "status": "1 of gate",
        f"cancel {message_id}": "cancelled",
    }.items():
        ran = CliRunner().invoke(delayed, [*command.split(), "--broker", url])
        assert ran.exit_code == 0, ran.output
        assert said in ran.output
    words = ["reschedule", message_id, later(days=1).isoformat(), "--broker", url]
    ran = CliRunner().invoke(delayed, words)
    assert ran.exit_code == 1
    assert ran.output == f"{message_id}  not rescheduled: it was cancelled before\n"


@pytest.mark.parametrize("command", ["show", "trace"])
def test_a_message_that_waits_is_shown_at_once(broker: BrokerProcess, command: str) -> None:
    url = f"http://{broker.host}:{broker.port}"
    (message_id,) = send(url, Message("gate", "B12", deliver_at=later(hours=3)))
    words = [command, message_id, "--broker", url]
    ran = CliRunner().invoke(messages, words)
    assert ran.exit_code == 0, ran.output
    assert re.search(r"pending +due 2\d{3}-.*subject +gate.*body +B12", ran.output, re.DOTALL)
    told = json.loads(CliRunner().invoke(messages, [*words, "--json"]).stdout)
    assert told["delayed"]["messages"][0]["message"]["body"] == "B12"
    run(url, "cancel", message_id)
    told = CliRunner().invoke(messages, words).output
    assert "cancelled   due" in told
    assert told.endswith(f"message_id {message_id}\nsubject    gate\nmessage    no longer kept\n")
    ran = CliRunner().invoke(messages, [command, "0" * 32, "--broker", url])
    assert ran.exit_code == 1
    assert "does not wait" in ran.stderr


def test_what_is_not_there_is_said(broker: BrokerProcess) -> None:
    url = f"http://{broker.host}:{broker.port}"
    for arguments in (
        ["show", "0" * 32],
        ["reschedule", "0" * 32, later(days=1).isoformat()],
    ):
        ran = CliRunner().invoke(delayed, [*arguments, "--broker", url])
        assert ran.exit_code == 1
        assert "is not delayed" in str(ran.exception) + ran.output


def test_B4_of_a_message_that_cannot_be_read_file_and_remedy_are_shown(tmp_path: Path) -> None:
    data, tomorrow = tmp_path / "own", later(days=1)
    with BrokerProcess(data, "--reserve-bytes", "0") as own:
        (message_id,) = send(own.url, Message("gate", "to be damaged", deliver_at=tomorrow))
        segment = data / "commitlog" / ("0" * 20)
        with segment.open("r+b") as file:
            file.seek(segment.read_bytes().index(b"to be damaged"))
            file.write(b"T")
        ran = CliRunner().invoke(delayed, ["show", message_id, "--broker", own.url])
        assert ran.exit_code == 1, ran.output
        assert f"{message_id}  gate     pending" in ran.stdout
        assert f"held  commitlog/{segment.name} is damaged at offset" in ran.stdout
        assert "qmq store verify" in ran.stdout


def test_the_programs_of_the_page_run(broker: BrokerProcess, tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    text = "\n".join(block.text for block in blocks(page) if block.language == "python")
    ran = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            text.replace(DOCUMENTED_ADDRESS, f"{broker.host}:{broker.port}"),
        ],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr


def test_B7_of_several_messages_with_one_id_that_of_a_subject_is_put_off_or_cancelled(
    broker: BrokerProcess,
) -> None:
    url = f"http://{broker.host}:{broker.port}"
    one = "ab" * 16
    for subject in ("gate", "seat"):
        message = {"subject": subject, "body": 1, "message_id": one, "delay_ms": 3_600_000}
        sent = httpx.post(f"{url}/v1/send", json={"messages": [message]}, timeout=DEADLINE_S)
        assert sent.status_code == 200
    moved = (datetime.now(UTC) + timedelta(days=3)).isoformat()
    unclear = CliRunner().invoke(delayed, ["reschedule", one, moved, "--broker", url])
    assert unclear.exit_code == 1
    assert run(url, "reschedule", one, moved, "--subject", "seat")["outcomes"] == {
        one: "rescheduled"
    }
    due = {row["subject"]: row["due_at_ms"] for row in run(url, "list")["delayed"]}
    assert due["seat"] > due["gate"]
    assert run(url, "cancel", one, "--subject", "gate")["outcomes"] == {one: "cancelled"}
    assert run(url, "status")["subjects"] == {"seat": 1}
