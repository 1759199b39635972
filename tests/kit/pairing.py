"""Which cases of two kinds meet: each once, where one does not depend on the other; all before a release."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice, product
from typing import TypeVar

import pytest

First = TypeVar("First")
Second = TypeVar("Second")


def pairs(
    config: pytest.Config, first: Sequence[First], second: Sequence[Second]
) -> list[tuple[First, Second]]:
    """Each with one of the others; with `--release` each with each."""
    if config.getoption("--release"):
        return list(product(first, second))
    count = max(len(first), len(second))
    return list(islice(zip(cycle(first), cycle(second), strict=False), count))
