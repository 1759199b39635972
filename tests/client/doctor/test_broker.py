"""The broker, asked over HTTP: a real one, and answers that only a broken one gives."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from qmq_client.commands.root import root
from qmq_client.doctor.broker import broker
from qmq_client.doctor.finding import Finding
from qmq_client.errors import ConfigurationError
from qmq_client.transport.address import BrokerAddress
from qmq_client.transport.http import HttpTransport
from tests.broker.delay.delay_rig import HOUR_MS, delayed_frame
from tests.broker.delay.test_shifted_clock import SERVE_SHIFTED
from tests.broker.face.guard import Authority, add_token
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S, LOOK_S, wait_for

MINUTE_MS = 60_000
MESSAGE_ID = bytes(range(16))


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def examined(url: str) -> dict[str, Finding]:
    return {finding.id: finding for finding in broker(url)}


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """Somebody who answers every question like this."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(LOOK_S,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_X1_a_broker_is_sound_full_and_gone(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with BrokerProcess(data, "--reserve-bytes", "0") as sound:
        assert examined(sound.url) == {}
        url = sound.url
    assert list(examined(url)) == ["broker.unreachable"]
    with BrokerProcess(data, "--reserve-bytes", str(2**60)) as full:
        found = examined(full.url)
    assert list(found) == ["broker.disk_reserve"]
    assert "lower its reserve" in found["broker.disk_reserve"].fix


def test_X1_a_read_only_broker_is_found_with_the_reason_that_the_operator_gave(
    tmp_path: Path,
) -> None:
    with BrokerProcess(tmp_path / "data", "--reserve-bytes", "0") as process:
        operate = partial(CliRunner().invoke, root)
        asked = ["broker", "readonly", "on", "--reason", "moving disks", "--broker", process.url]
        assert operate(asked).exit_code == 0
        (finding,) = examined(process.url).values()
        assert finding.id == "broker.read_only"
        assert finding.read.endswith("read-only: moving disks")
        command = finding.fix.removeprefix("qmq ").split()
        assert operate(command).exit_code == 0, "the fix is a command that runs as it stands"
        assert examined(process.url) == {}


def test_X1_a_token_that_is_unknown_or_can_be_read_on_the_way_is_found(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    text = add_token(tokens, "producer")[1]
    options = ("--reserve-bytes", "0", "--tokens", str(tokens))
    with BrokerProcess(tmp_path / "data", *options) as process:

        def ids(token: str = "", url: str = process.url) -> list[str]:
            return [one.id for one in broker(BrokerAddress(url=url, token=token))]

        assert ids(text) == []
        assert ids() == ["broker.access"]
        assert ids(text[:-1] + "x") == ["broker.access"]
        # Also this machine, but not by a name that says so.
        assert ids(text, f"http://0.0.0.0:{process.port}") == ["broker.token_in_clear"]


def test_X1_a_broker_that_does_not_serve_is_found_with_its_reason() -> None:
    told = {"status": "poisoned", "reason": "a sync failed: EIO", "takes_messages": False}
    with answering(503, json.dumps(told).encode()) as url:
        found = examined(url)
    assert list(found) == ["broker.not_ready"]
    assert found["broker.not_ready"].read.endswith("poisoned: a sync failed: EIO")


def test_X1_a_broker_in_a_weaker_mode_is_found() -> None:
    told = {"status": "serving", "takes_messages": True, "durability": "written"}
    with answering(200, json.dumps(told).encode()) as url:
        assert list(examined(url)) == ["broker.durability"]


def test_X1_D1_a_clock_that_was_moved_is_found_and_gone_when_it_is_right(tmp_path: Path) -> None:
    shift = tmp_path / "shift"
    shift.write_text("0")
    data, options = tmp_path / "data", ("--shift", str(shift))
    with BrokerProcess(data, *options, command=SERVE_SHIFTED) as broker_process:
        url = broker_process.url
        assert examined(url) == {}
        shift.write_text(str(-HOUR_MS))
        wait_for(lambda: list(examined(url)) == ["broker.delayed_clock"], "the clock is back")
        assert "the clock was set back" in examined(url)["broker.delayed_clock"].read
        shift.write_text("0")
        wait_for(lambda: examined(url) == {}, "the clock is right")


def test_X1_D1_a_clock_set_back_before_a_restart_is_found_as_a_log_that_is_ahead(
    tmp_path: Path,
) -> None:
    shift = tmp_path / "shift"
    shift.write_text("0")
    data, options = tmp_path / "data", ("--shift", str(shift))
    message = {"messages": [{"subject": "orders", "body": 1}]}
    with BrokerProcess(data, *options, command=SERVE_SHIFTED) as before:
        httpx.post(f"{before.url}/v1/send", json=message, timeout=DEADLINE_S).raise_for_status()
        assert before.stop() == 0
    shift.write_text(str(-HOUR_MS))
    with BrokerProcess(data, *options, command=SERVE_SHIFTED) as after:
        finding = examined(after.url)["broker.delayed_clock"]
        assert "the log is ahead of the clock" in finding.read
        seconds = re.search("and wait: after ([0-9]+) s the clock has passed the log", finding.fix)
        assert seconds is not None
        assert HOUR_MS // 1000 - 600 < int(seconds[1]) <= HOUR_MS // 1000
        told = CliRunner().invoke(root, ["doctor", "--broker", after.url])
        assert told.exit_code == 1, told.output
        assert "broker.delayed_clock" in told.output
        shift.write_text("0")
        wait_for(lambda: examined(after.url) == {}, "the clock is right")


def test_X1_D3_a_delayed_message_that_cannot_be_read_is_found_with_its_file(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with BrokerProcess(data, "--reserve-bytes", "0") as before:
        transport = HttpTransport(before.url)
        later = {b"to be damaged": now_ms() + 5 * MINUTE_MS}
        transport.send(delayed_frame(later, ids=iter([MESSAGE_ID])))
        transport.close()
        before.kill()
    segment = data / "commitlog" / ("0" * 20)
    with BrokerProcess(data, "--reserve-bytes", "0") as process:
        soon = {"message_id": MESSAGE_ID.hex(), "deliver_at_ms": now_ms() + 3_000}
        answer = httpx.post(f"{process.url}/v1/delayed/reschedule", json=soon, timeout=DEADLINE_S)
        assert answer.json()["outcomes"] == ["rescheduled"]
        whole = segment.read_bytes()
        with segment.open("r+b") as file:
            file.seek(whole.rindex(b"to be damaged"))
            file.write(b"T")
        wait_for(lambda: list(examined(process.url)) == ["broker.delayed_damage"], "it is due")
        finding = examined(process.url)["broker.delayed_damage"]
        assert f"commitlog/{segment.name} is damaged at offset" in finding.read
        with segment.open("r+b") as file:
            file.write(whole[: 1 << 16])
        command = finding.fix.rpartition("; ")[2].removeprefix("qmq ").split()
        assert CliRunner().invoke(root, command).exit_code == 0
        wait_for(lambda: examined(process.url) == {}, "it is read again")


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"<html>"),
        (200, b"[]"),
        (200, b"x" * 100_000),
        (502, b"<html>"),
        (502, b'{"message":"no upstream"}'),
        (404, b'{"detail":"Not Found"}'),
    ],
)
def test_somebody_who_is_no_broker_is_found(status: int, body: bytes) -> None:
    with answering(status, body) as url:
        assert list(examined(url)) == ["broker.unreachable"]


@pytest.mark.parametrize("url", ["nowhere", "ftp://127.0.0.1", "http://shop..broker:9470"])
def test_an_address_that_is_none_is_a_wrong_call(url: str) -> None:
    with pytest.raises(ConfigurationError, match="--broker"):
        examined(url)


@pytest.mark.parametrize(
    ("days", "told"), [(90, ""), (13.5, "expires in 13 days"), (-1, "has expired")]
)
def test_X1_a_certificate_that_has_expired_or_soon_will_is_found(
    tmp_path: Path, days: float, told: str
) -> None:
    authority = Authority(tmp_path / "authority")
    end = datetime.now(UTC) + timedelta(days=days)
    files = authority.issue(
        "127.0.0.1", as_file="server", not_before=end - timedelta(days=99), not_after=end
    )
    options = ["--tls-cert", files[0], "--tls-key", files[1]]
    with BrokerProcess(tmp_path / "data", *options) as process:
        url = process.url.replace("http://", "https://")
        found = {one.id: one for one in broker(BrokerAddress(url=url, ca_file=str(authority.file)))}
        assert found.keys() - {"broker.unreachable"} == ({"broker.certificate"} if told else set())
        assert not told or told in found["broker.certificate"].read
        process.kill()
