"""What the tests of service and face share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker.service.rig import Rig
from tests.crash.enumeration import CHECKED


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A broker without a network face, stepped by hand."""
    rig = Rig(tmp_path / "data")
    yield rig
    rig.close()


@pytest.fixture
def one_in(request: pytest.FixtureRequest) -> int:
    """Of so many crash states one is opened; each of them before a release."""
    return 1 if request.config.getoption("--release") else CHECKED
