"""X-23, X-27: slips that the linter knows, and patterns that a caller might give, are nowhere in the product."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib

from tests.tidy.house import PACKAGES, ROOT, Source, product

#: An assert is for our own mistakes; names of tables in statements are checked (`checked_name`).
LEFT_OUT = {"S101", "S608"}


def patterns(source: Source) -> list[str]:
    """Calls of `re` whose pattern is more than what stands in the code."""
    found = []
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re")), args=[pattern, *_]):
                if not is_written_down(pattern):
                    found.append(f"{source.path}:{node.lineno}")
    return found


def is_written_down(pattern: ast.expr) -> bool:
    """Whether it is made of literals and constants alone."""
    names = [node.id for node in ast.walk(pattern) if isinstance(node, ast.Name)]
    return all(name.isupper() for name in names)


def test_X_23_patterns_are_written_down_and_never_made_of_what_callers_say() -> None:
    assert [one for source in product() for one in patterns(source)] == []


def test_a_planted_pattern_is_found() -> None:
    for text in ("re.compile(text)", "re.search(f'a{text}', b)", "re.match('a' + text, b)"):
        assert patterns(Source(path="a.py", text=text)), text
    assert not patterns(Source(path="a.py", text="re.compile(rf'{_A}b')"))


def test_X_27_the_linter_looks_for_dangerous_calls_in_all_of_the_product() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lint = settings["tool"]["ruff"]["lint"]
    assert "S" in lint["select"]
    assert {rule for rule in lint["ignore"] if rule.startswith("S")} == LEFT_OUT
    for folder in PACKAGES.values():
        path = folder / "planted.py"
        checked = subprocess.run(
            [sys.executable, "-m", "ruff", "check", "--no-cache", "--stdin-filename", str(path)],
            input='"""Planted."""\n\nimport subprocess\n\nsubprocess.run("ls", shell=True)\n',
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert "S602" in checked.stdout, folder
