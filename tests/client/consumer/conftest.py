from __future__ import annotations

import pytest

from tests.client.consumer.kit import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()
