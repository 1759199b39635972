"""Which hosts are this machine alone."""

from __future__ import annotations

import pytest

from qmq_client.wire.loopback import is_loopback


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.10", "::1"])
def test_this_machine_alone(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "0.0.0.0",
        "::",
        "10.0.0.1",
        "192.168.1.7",
        "localhost.example.org",
        "127.0.0.1.org",
        "127.1",
    ],
)
def test_others_may_read_what_is_sent_to_any_other_host(host: str) -> None:
    assert not is_loopback(host)
