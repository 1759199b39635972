"""What the tests of service and face share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker.service.rig import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A broker without a network face, stepped by hand."""
    rig = Rig(tmp_path / "data")
    yield rig
    rig.close()
