"""No parse of a test run fails because another one came between."""

from __future__ import annotations

import ast
import gc
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.parsing import undisturbed

MANY_NODES = f"[{', '.join(['{1: [2]}'] * 300)}]"


@pytest.fixture
def busy_collector() -> Iterator[list[str]]:
    """Collects after few objects, and parses whenever it does."""
    seen: list[str] = []

    def on_collection(phase: str, facts: dict[str, Any]) -> None:
        seen.append(phase)
        ast.parse("1")

    thresholds = gc.get_threshold()
    gc.callbacks.append(on_collection)
    gc.set_threshold(50)
    yield seen
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(on_collection)


def test_a_parse_is_not_disturbed_by_what_the_garbage_collector_calls(
    busy_collector: list[str],
) -> None:
    parse = undisturbed(inspect.unwrap(ast.parse))
    for _ in range(10):
        tree = parse(MANY_NODES, mode="eval")
        assert len(tree.body.elts) == 300
    assert gc.isenabled()
    assert busy_collector


def test_a_parse_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(SyntaxError):
        undisturbed(ast.parse)("(")
    assert gc.isenabled()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="a bug of CPython 3.11")
def test_this_very_run_parses_so() -> None:
    assert hasattr(ast.parse, "__wrapped__")
