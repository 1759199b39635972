"""A module fits a sitting, a function fits a screen, a call fits a line."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.tidy.house import Source, python

MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60
#: Parameters that may be given by position, `self` not counted.
POSITIONAL_MAX = 6


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def long_modules(source: Source) -> list[str]:
    lines = len(source.text.splitlines())
    return [f"{source.path}: {lines} lines"] if lines > MODULE_LINES_MAX else []


def long_functions(source: Source) -> list[str]:
    faults = []
    for function in functions(source):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        if lines > FUNCTION_LINES_MAX:
            faults.append(f"{source.path}:{function.lineno} {function.name}: {lines} lines")
    return faults


def wide_functions(source: Source) -> list[str]:
    faults = []
    for function in functions(source):
        names = [argument.arg for argument in function.args.posonlyargs + function.args.args]
        count = len([name for name in names if name not in {"self", "cls"}])
        if count > POSITIONAL_MAX and not source.name.startswith(("test_", "conftest")):
            faults.append(f"{source.path}:{function.lineno} {function.name}: {count} parameters")
    return faults


RULES = {
    "a module is longer than 600 lines": long_modules,
    "a function is longer than 60 lines": long_functions,
    "a function takes more than six positional parameters": wide_functions,
}


@pytest.fixture(scope="module")
def faults() -> dict[str, list[str]]:
    """By rule; a source is parsed once for all of them."""
    found: dict[str, list[str]] = {name: [] for name in RULES}
    for source in python():
        for name, rule in RULES.items():
            found[name] += rule(source)
    return found


@pytest.mark.parametrize("rule", RULES)
def test_nowhere_in_the_house(faults: dict[str, list[str]], rule: str) -> None:
    assert faults[rule] == []


def test_planted_sizes_over_the_bound_are_found() -> None:
    long = Source(path="long.py", text="\n" * 601)
    assert long_modules(long)
    assert not long_modules(Source(path="fits.py", text="\n" * 600))
    body = "async def f():\n" + "    pass\n" * 60
    assert long_functions(Source(path="f.py", text=body))
    assert not long_functions(Source(path="f.py", text=body.replace("    pass\n", "", 1)))
    wide = "class A:\n    def f(self, a, b, c, d, e, f, {}g): pass\n"
    assert wide_functions(Source(path="f.py", text=wide.format("")))
    assert not wide_functions(Source(path="f.py", text=wide.format("*, ")))
