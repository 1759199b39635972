from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.broker_process import BrokerProcess


@pytest.fixture(scope="module")
def broker_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path_factory.mktemp("broker") / "data")
    process.start()
    yield process
    process.stop()
