"""The forwarder of the tests of faults leaves nothing behind."""

from __future__ import annotations

import socket
import threading

import pytest

from tests.faults.proxy import Proxy
from tests.kit.waiting import DEADLINE_S, wait_for

#: Its threads are inside a call of a socket when it ends, or between two: both happen.
ROUNDS = 20


def test_behind_its_block_nobody_listens_and_no_connection_is_left() -> None:
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as target:
        for _ in range(ROUNDS):
            with Proxy(target.getsockname()[1]) as proxy:
                client = socket.create_connection(("127.0.0.1", proxy.port), DEADLINE_S)
                server, _ = target.accept()
                server.settimeout(DEADLINE_S)
                client.sendall(b"a")
                assert server.recv(1) == b"a"
            with client, server:
                assert (client.recv(1), server.recv(1)) == (b"", b"")
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", proxy.port), DEADLINE_S).close()
    wait_for(lambda: set(threading.enumerate()) <= before)
