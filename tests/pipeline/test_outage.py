"""How long a broker that is away is waited for, what is told of it, and what is not waited for."""

from __future__ import annotations

import logging
import re
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme
from click.testing import CliRunner

from qmq_client.transport.address import BrokerAddress
from qmq_pipeline.cli import pipeline
from qmq_pipeline.errors import OptionError, SourceError, UnreachableError
from qmq_pipeline.places.options import parse_log_options
from qmq_pipeline.places.outage import WAIT_S, AwayError, Outage
from qmq_pipeline.places.remote import RemoteDisk
from tests.pipeline.world import WallClock

URL = "http://broker:9470"


class World:
    """A clock, and what was logged."""

    def __init__(self, log: pytest.LogCaptureFixture) -> None:
        self.clock = WallClock()
        self._log = log

    @property
    def told(self) -> list[str]:
        return self._log.messages

    def outage(self, wait_s: float) -> Outage:
        return Outage(URL, wait_s, clock=self.clock)

    @property
    def passed_s(self) -> float:
        return self.clock.monotonic_s() - WallClock().monotonic_s()


@pytest.fixture
def world(caplog: pytest.LogCaptureFixture) -> Iterator[World]:
    with caplog.at_level(logging.WARNING, logger="qmq.pipeline"):
        yield World(caplog)


class Broker:
    """Is away until a time, then answers."""

    def __init__(self, world: World, back_s: float) -> None:
        self._world = world
        self._back_s = back_s
        self.asked = 0

    def answer(self) -> str:
        self.asked += 1
        if self._world.passed_s < self._back_s:
            raise AwayError("Connection refused")
        return "here"


def test_a_broker_that_is_away_is_waited_for_and_that_is_reported_once_at_its_begin_and_its_end(
    world: World,
) -> None:
    broker = Broker(world, back_s=40)
    assert world.outage(60).outlast(broker.answer, remedy="Start it") == "here"
    began, over = world.told
    assert began == (
        f"{URL}: the broker does not answer: Connection refused; waiting for it, for 60 s at most"
    )
    assert re.fullmatch(f"{URL}: the broker answers again, after 4[01] s", over)
    assert 40 < broker.asked < 60, "about once a second"


def test_it_is_waited_for_no_longer_than_was_said(world: World) -> None:
    outage = world.outage(60)
    with pytest.raises(UnreachableError, match=r"refused\. Start it") as raised:
        outage.outlast(Broker(world, back_s=61).answer, remedy="Start it")
    assert (raised.value.source, round(world.passed_s)) == (URL, 60)
    assert ["waiting for it" in one for one in world.told] == [True]
    assert outage.outlast(Broker(world, back_s=90).answer, remedy="") == "here", "each time anew"


def test_what_is_over_within_a_second_is_not_told_and_without_a_wait_that_is_all(
    world: World,
) -> None:
    assert world.outage(0).outlast(Broker(world, back_s=0.9).answer, remedy="") == "here"
    with pytest.raises(UnreachableError):
        world.outage(0).outlast(Broker(world, back_s=9).answer, remedy="")
    assert (world.told, 1.9 <= world.passed_s <= 2.1) == ([], True)


def test_only_the_time_counts_in_which_nothing_comes(world: World) -> None:
    outage = world.outage(10)
    tries = 0

    def broken_answer() -> int:
        nonlocal tries
        tries += 1
        if tries == 100:
            return tries
        if tries % 3 == 0:
            outage.arrived()
        world.clock.sleep(2)
        raise AwayError("it broke off")

    assert outage.outlast(broken_answer, remedy="") == 100
    assert world.passed_s > 190


class RefusingServer(ThreadingHTTPServer):
    """Has the statuses that its requests are answered with."""

    def __init__(self, statuses: Sequence[int]) -> None:
        super().__init__(("127.0.0.1", 0), Refusing)
        self.statuses = list(statuses)


class Refusing(BaseHTTPRequestHandler):
    """Answers with the statuses of its server, one after the other; the last one stays."""

    def do_GET(self) -> None:
        assert isinstance(self.server, RefusingServer)
        statuses = self.server.statuses
        status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
        content = b'{"names": []}'
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def serving(statuses: Sequence[int], context: ssl.SSLContext | None = None) -> Iterator[str]:
    """The address of a server that answers with these statuses."""
    with RefusingServer(statuses) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def asked(url: str, clock: WallClock, **more: Any) -> list[str]:
    with closing(RemoteDisk(BrokerAddress(url=url, **more), wait_s=60, clock=clock)) as disk:
        return disk.names("commitlog")


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_broker_that_is_not_ready_is_asked_again(status: int) -> None:
    clock = WallClock()
    with serving([status] * 5 + [200]) as address:
        assert asked(f"http://{address}", clock) == []
    assert clock.wall_ms > WallClock().wall_ms


@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_a_refusal_is_not_waited_for(status: int) -> None:
    clock = WallClock()
    with serving([status, 200]) as address, pytest.raises(SourceError, match=f"status {status}"):
        asked(f"http://{address}", clock)
    assert clock.wall_ms == WallClock().wall_ms


def test_certificates_that_do_not_fit_are_not_waited_for(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority, other = trustme.CA(), trustme.CA()
    authority.issue_cert("127.0.0.1").configure_cert(context)
    other.cert_pem.write_to_path(tmp_path / "other.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    clock = WallClock()
    with serving([200], context) as address:
        with pytest.raises(SourceError, match="CERTIFICATE_VERIFY_FAILED") as raised:
            asked(f"https://{address}", clock, ca_file=str(tmp_path / "other.pem"))
        assert asked(f"https://{address}", clock, ca_file=str(tmp_path / "ca.pem")) == []
    assert type(raised.value) is SourceError, "a wrong call, and no broker that is away"
    with serving([200]) as address, pytest.raises(SourceError, match="http:// or https://"):
        asked(f"https://{address}", clock, ca_file=str(tmp_path / "ca.pem"))
    assert clock.wall_ms == WallClock().wall_ms


def test_a_connection_that_ends_in_the_middle_of_TLS_is_one_that_broke(tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    clock = WallClock()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            while True:
                try:
                    listener.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=hang_up, daemon=True).start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(UnreachableError):
            asked(url, clock, ca_file=str(tmp_path / "ca.pem"))
        listener.shutdown(socket.SHUT_RDWR)
    assert clock.monotonic_s() - WallClock().monotonic_s() == pytest.approx(60, abs=2)


def test_a_command_says_that_it_waits_and_for_how_long(tmp_path: Path) -> None:
    line = ["ingest", "--broker", "http://127.0.0.1:1", "--tables", str(tmp_path / "t"), "--wait"]
    done = CliRunner().invoke(pipeline, [*line, "1.5"])
    said, error = done.stderr.strip().split("\n")
    assert (done.exit_code, said.endswith("; waiting for it, for 1.5 s at most")) == (3, True)
    assert error.startswith("\rError: http://127.0.0.1:1: the broker does not answer: ")
    assert CliRunner().invoke(pipeline, [*line, "0", "--quiet"]).exit_code == 3
    assert CliRunner().invoke(pipeline, [*line, "-1"]).exit_code == 2
    assert not (tmp_path / "t").exists()


def test_a_source_learns_how_long_to_wait_by_an_option() -> None:
    given = {"broker_url": URL}
    assert parse_log_options(given).place.wait_s == WAIT_S
    assert parse_log_options({**given, "waitS": "7"}).place.wait_s == 7
    with pytest.raises(OptionError, match="wait_s"):
        parse_log_options({**given, "wait_s": "soon"})
