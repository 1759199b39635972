"""`qmq broker status | readonly | drain` on a real broker."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result

from qmq_broker.face.exit_codes import ExitCode
from qmq_client.commands.root import root
from tests.broker.face.test_process import HEADERS, pull_all
from tests.broker.service.rig import make_frame, new_ids
from tests.client.transport.hostile_server import answer, hostile_server
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S


def run(*arguments: str) -> Result:
    return CliRunner().invoke(root, ["broker", *arguments])


def send(url: str) -> httpx.Response:
    frame = make_frame([b"one"], ids=new_ids())
    return httpx.post(f"{url}/v1/send", content=frame, headers=HEADERS, timeout=DEADLINE_S)


def test_a_read_only_broker_refuses_messages_by_reason_and_delivers(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as process:
        url = process.url
        assert send(url).status_code == 200
        assert run("readonly", "on", "--broker", url, "--reason", "disk change").output == (
            "read-only: disk change\n"
        )
        refused = send(url)
        assert (refused.status_code, "disk change" in refused.text) == (503, True)
        assert "retry-after" in refused.headers
        shown = run("status", "--broker", url, "--json")
        assert shown.exit_code == 0, "a read-only broker serves its consumers"
        assert json.loads(shown.output)["takes_messages"] is False
        with httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
            assert len(pull_all(client)) == 1
        assert run("readonly", "off", "--broker", url).output == "serving\n"
        assert run("readonly", "off", "--broker", url).output == "serving\n"
        assert send(url).status_code == 200


def test_a_broker_without_room_for_messages_says_so(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", "--reserve-bytes", str(2**50)) as process:
        assert send(process.url).status_code == 507
        shown = run("status", "--broker", process.url)
        assert shown.exit_code == 0, "its consumers are served"
        assert "serving: consumers only: the disk is below its reserve" in shown.output


def test_a_drained_broker_ends_in_order(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as process:
        assert send(process.url).status_code == 200
        assert run("drain", "--broker", process.url, "--reason", "moving").output == (
            "draining: moving\n"
        )
        assert process.wait() == ExitCode.OK
        assert "draining reason=moving" in process.log
    with BrokerProcess(tmp_path / "data") as process:
        assert "recovery.clean=True" in process.log


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"state": "poisoned"}',
        b'{"state": "serving", "more": 1}',
        b'{"state": "read-only", "reason": "%s"}' % (b"x" * 501),
        b"[" * 5000,
    ],
)
def test_S7_a_state_that_makes_no_sense_is_refused_by_field(tmp_path: Path, body: bytes) -> None:
    with BrokerProcess(tmp_path / "data") as process:
        answer = httpx.post(f"{process.url}/v1/state", content=body, timeout=DEADLINE_S)
        refused = answer.json()
        is_json = body.startswith(b"{")
        assert answer.status_code == (422 if is_json else 400)
        assert refused.get("field") in ({"state", "more", "reason"} if is_json else {None})
        assert refused["code"] == ("invalid_message" if is_json else "protocol_error")
        assert httpx.get(f"{process.url}/readyz", timeout=DEADLINE_S).json()["status"] == "serving"


def test_without_a_broker_the_exit_code_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for command in (["status"], ["drain"], ["readonly", "on"]):
        result = run(*command, "--broker", f"http://127.0.0.1:{port}")
        assert result.exit_code == 3
        assert "no connection" in result.output


ASKING = (
    "broker status",
    "broker drain",
    "broker readonly on",
    "broker keepers",
    "subjects",
    "groups",
    "lag",
    "dead list orders stock",
    "delayed list",
    "message trace 00000000000000000000000000000001",
    "send orders 1",
    "tail orders",
)


@pytest.mark.parametrize(
    "status", ["200 OK", "301 Moved", "403 Forbidden", "404 Not Found", "502 Bad Gateway"]
)
@pytest.mark.parametrize("command", ASKING)
def test_an_answer_of_a_proxy_is_an_outage_that_is_named(command: str, status: str) -> None:
    page = answer(b"<html>", status=status, content_type="text/html")
    with hostile_server(page) as server:
        result = CliRunner().invoke(root, [*command.split(), "--broker", server.url])
    assert result.exit_code == 3
    what = f"(status {status[:3]}|an answer without).*which is not an answer of a broker"
    told = rf"{server.url}/\S+: {what}"
    assert re.search(told, result.output)


def asked(*arguments: str) -> str:
    """The address that nobody answered at."""
    result = run("status", *arguments)
    assert result.exit_code == 3, result.output
    (url,) = re.findall(r"(http://127.0.0.1:\d+/\w+)/readyz: no connection", result.output)
    return str(url)


def test_the_address_is_that_of_the_configuration_as_for_every_other_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qmq.toml").write_text(f'[broker]\nurl = "{nobody}/here"\n')
    (tmp_path / "other.toml").write_text(f'[broker]\nurl = "{nobody}/other/"\n')
    assert asked() == f"{nobody}/here"
    monkeypatch.setenv("QMQ_CONFIG", "other.toml")
    assert asked() == f"{nobody}/other"
    monkeypatch.setenv("QMQ_BROKER_URL", f"{nobody}/variable")
    assert asked() == f"{nobody}/variable"
    assert asked("--broker", f"{nobody}/flag") == f"{nobody}/flag"


@pytest.mark.parametrize("text", ["broker = 1", "[broker]\nurl = 1", "no toml", None])
def test_a_configuration_that_cannot_be_used_is_a_wrong_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("QMQ_CONFIG", str(path))
    result = run("status")
    assert (result.exit_code, str(path) in result.output) == (2, True)


@pytest.mark.parametrize("url", ["nowhere", "ftp://127.0.0.1", "http://[::"])
def test_an_address_that_is_none_is_a_wrong_call(url: str) -> None:
    result = run("status", "--broker", url)
    assert result.exit_code == 2
    assert "Use a URL like http://127.0.0.1:9470." in result.output


@pytest.mark.parametrize("command", ["status", "readonly", "drain"])
def test_help_tells_the_variable_the_file_and_the_exit_codes(command: str) -> None:
    shown = " ".join(run(command, "--help").output.split())
    for text in (
        "QMQ_BROKER_URL",
        "qmq.toml",
        "Exit codes: 0",
        "3 no broker answers",
    ):
        assert text in shown
