from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.world import World, a_world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with a_world(tmp_path) as made:
        yield made
