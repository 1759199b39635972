from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from qmq_client.transport.http import HttpTransport
from qmq_client.transport.memory import MemoryBroker, MemoryTransport
from qmq_client.transport.port import Transport
from tests.kit.broker_process import BrokerProcess

_numbers = itertools.count()


@pytest.fixture(scope="session")
def broker_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as process:
        yield process


@pytest.fixture(params=["memory", "http"])
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    """The same promises, whoever keeps them."""
    made: Transport
    if request.param == "memory":
        made = MemoryTransport(MemoryBroker())
    else:
        made = HttpTransport(request.getfixturevalue("broker_process").url)
    yield made
    made.close()


@pytest.fixture
def subject() -> str:
    """A subject that no other test uses."""
    return f"contract.{next(_numbers)}"
