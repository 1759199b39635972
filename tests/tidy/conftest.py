"""What these tests keep for each other, and for nobody else."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.tidy.house import forget


@pytest.fixture(scope="package", autouse=True)
def _trees() -> Iterator[None]:
    """Millions of nodes: behind these tests, every collection of garbage would look through them.

    Nor is it looked for each time that some hundred of them were made.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    yield
    gc.set_threshold(*thresholds)
    forget()
