"""B10: idle connections take what is theirs; the broker's own files stay possible."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from qmq_broker.face.connection.listener import (
    files_needed,
    fit_connections,
    raise_files_limit,
)
from qmq_broker.face.exit_codes import ExitCode
from qmq_broker.face.limits import FaceLimits
from tests.kit.broker_process import SERVE_WITH_FAULTS, BrokerProcess
from tests.kit.waiting import DEADLINE_S

PULL = {"subject": "orders", "group": "new", "consumer": "one"}


@pytest.fixture
def _many_files() -> Iterator[None]:
    """The connections are this process's too, and some systems begin at 256."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_files_limit()
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("_many_files")
def test_B10_idle_connections_do_not_keep_the_broker_from_its_files(tmp_path: Path) -> None:
    more = ("--files", "560", "--connections", "2000", "--head-ms", "60000")
    kept = httpx.Limits(keepalive_expiry=None)  # for a second connection there is no room
    with (
        BrokerProcess(tmp_path / "data", *more, command=SERVE_WITH_FAULTS) as broker,
        httpx.Client(base_url=broker.url, timeout=DEADLINE_S, limits=kept) as client,
        ExitStack() as idle,
    ):
        sent = client.post("/v1/send", json={"messages": [{"subject": "orders", "body": 1}]})
        assert sent.status_code == 200
        for _ in range(700):
            idle.enter_context(socket.create_connection((broker.host, broker.port), timeout=60))
        # The first pull of a group makes the first file of the action log.
        assert client.post("/v1/pull", json=PULL).status_code == 200
        assert broker.stop() == ExitCode.OK
    assert " fewer_connections files=560 connections=48" in broker.log


def test_B10_a_process_that_may_open_hardly_any_files_does_not_start(tmp_path: Path) -> None:
    data = tmp_path / "data"
    broker = BrokerProcess(data, "--files", "400", command=SERVE_WITH_FAULTS)
    assert broker.run_to_end() == ExitCode.USAGE
    assert " too_few_files files=400 needed=528" in broker.log
    assert "ulimit" in broker.log


@pytest.mark.parametrize(
    ("files", "connections"),
    [(resource.RLIM_INFINITY, 2_000), (65_536, 2_000), (1_024, 512), (528, 16), (527, None)],
)
def test_connections_are_what_files_leave(files: int, connections: int | None) -> None:
    fitting = fit_connections(FaceLimits(connections=2_000), files=files, queue_files=256)
    assert (fitting and fitting.connections) == connections
    assert (files >= files_needed(256)) == (fitting is not None) or files == resource.RLIM_INFINITY
