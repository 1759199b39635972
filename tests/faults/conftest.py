from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.broker_process import BrokerProcess


@pytest.fixture(scope="module")
def broker_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as process:
        yield process
