"""A command that the broker does not know says that the broker is older, whatever it would have asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from click.testing import CliRunner

from qmq_client.commands.root import root
from tests.broker.face.asgi import Client
from tests.broker.service.rig import Rig
from tests.kit.waiting import LOOK_S

ID = "0123456789abcdef0000000000000001"


class Older(ThreadingHTTPServer):
    """Answers everything as a broker without that route does."""

    answer: tuple[int, bytes]


class _Answering(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Older)
        self.rfile.read(int(self.headers.get("content-length", 0)))
        status, body = self.server.answer
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Nothing on standard error."""


@pytest.fixture(params=["GET", "BREW"])
def older(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of such a broker; without the path, or without the method."""
    path = "/v1/of-a-later-version" if request.param == "GET" else "/v1/subjects"
    rig = Rig(tmp_path / "data")
    reply = asyncio.run(Client(rig).call(request.param, path))
    rig.close()
    with Older(("127.0.0.1", 0), _Answering) as server:
        server.answer = reply.status, reply.body
        Thread(target=server.serve_forever, args=(LOOK_S,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    "words",
    [
        ("subjects",),
        ("groups",),
        ("lag",),
        ("groups", "pause", "a", "b"),
        ("groups", "resume", "a", "b"),
        ("groups", "seek", "a", "b", "earliest"),
        ("groups", "configure", "a", "b", "--max-attempts", "3"),
        ("groups", "remove", "a", "b", "--yes"),
        ("subjects", "remove", "a", "--yes"),
        ("dead", "list", "a", "b"),
        ("dead", "replay", "a", "b"),
        ("dead", "purge", "a", "b", "--yes"),
        ("delayed", "list"),
        ("delayed", "status"),
        ("delayed", "show", ID),
        ("delayed", "cancel", ID),
        ("delayed", "reschedule", ID, "2030-01-01"),
        ("delayed", "retry"),
        ("delayed", "accept-clock"),
        ("message", "show", ID),
        ("message", "trace", ID),
        ("tail", "a"),
        ("tail", "a", "--follow"),
        ("broker", "keepers"),
    ],
)
def test_B13_a_command_that_the_broker_does_not_know_says_that_the_broker_is_older(
    older: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(root, [*words, "--broker", older])
    told = " ".join(ended.stderr.split())
    assert ended.exit_code == 1, ended.output
    assert (
        "this broker does not know this request: it is older than this command. Update the broker"
        in told
    )
