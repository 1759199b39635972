"""What these tests keep for each other, and for nobody else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tidy.house import forget


@pytest.fixture(scope="package", autouse=True)
def _trees() -> Iterator[None]:
    """Millions of nodes: behind these tests, every collection of garbage would look through them."""
    yield
    forget()
