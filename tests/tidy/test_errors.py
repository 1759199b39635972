"""One scheme of errors: a tree in each package's `errors.py`, and a code and a sentence for each leaf."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from tests.tidy.house import PACKAGES, Source, product, read

#: The root of all errors; the cellar imports nothing of the house and has one of its own.
ROOTS = ("QmqError", "MigrationError")
#: One line of a tree.
BRANCH = re.compile(r"^(?P<bars>(?:│   |    )*)(?:├── |└── )?(?P<name>\w+Error)\b(?P<cut> …)?")
CODE = re.compile(r"[a-z]+(_[a-z]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One class of errors, as its module defines it."""

    path: str
    name: str
    parents: tuple[str, ...]
    code: str
    is_explained: bool


def kinds(sources: Sequence[Source]) -> list[Kind]:
    """Every class that is one of our errors, wherever it is defined."""
    classes = [
        (source.path, node)
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    ]
    ours, found = set(ROOTS), list[Kind]()
    while True:
        new = [
            as_kind(path, node)
            for path, node in classes
            if node.name not in ours and ours & {ast.unparse(base) for base in node.bases}
        ]
        if not new:
            return found
        found += new
        ours |= {kind.name for kind in new}


def as_kind(path: str, node: ast.ClassDef) -> Kind:
    codes = [
        ast.literal_eval(line.value or "")
        for line in node.body
        if (isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "code")
        or (isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == "code")
    ]
    return Kind(
        path=path,
        name=node.name,
        parents=tuple(ast.unparse(base) for base in node.bases),
        code=codes[0] if codes else "",
        is_explained=ast.get_docstring(node) is not None,
    )


def drawn(source: Source) -> Iterator[tuple[str, str]]:
    """Name and parent of each leaf and branch of the tree in a module's docstring.

    What is followed by an ellipsis is drawn elsewhere.
    """
    tree = (ast.get_docstring(source.tree) or "").partition("::\n")[2]
    above: list[str] = []
    for line in tree.splitlines():
        found = BRANCH.match(line.removeprefix("    "))
        if found is None:
            continue
        depth = len(found["bars"]) // 4 + ("── " in line)
        above = [*above[:depth], found["name"]]
        if depth and not found["cut"]:
            yield found["name"], above[-2]


def tree_faults(found: Sequence[Kind], trees: Sequence[Source]) -> list[str]:
    """Errors that no tree shows under their parent, and those that a tree shows and nobody defines."""
    shown = Counter(pair for tree in trees for pair in drawn(tree))
    is_a = {(kind.name, parent) for kind in found for parent in kind.parents}
    faults = [
        f"{kind.path}: {kind.name} is drawn {times} times under its parent"
        for kind in found
        if (times := sum(shown[kind.name, parent] for parent in kind.parents)) != 1
    ]
    return faults + [f"{name} is drawn under {above}" for name, above in set(shown) - is_a]


def code_faults(found: Sequence[Kind]) -> list[str]:
    """Errors without a code of their own, or without a sentence."""
    times = Counter(kind.code for kind in found)
    faults = [
        f"{kind.path}: {kind.name} has the code {kind.code!r}"
        for kind in found
        if times[kind.code] > 1 or not CODE.fullmatch(kind.code)
    ]
    return faults + [
        f"{kind.path}: {kind.name} says nothing" for kind in found if not kind.is_explained
    ]


@pytest.fixture(scope="module")
def house() -> list[Kind]:
    """Every error of the house; reading all of it takes a while."""
    return kinds(product())


def test_every_error_stands_in_the_tree_of_its_package(house: list[Kind]) -> None:
    for folder in PACKAGES.values():
        found = [kind for kind in house if f"{folder.name}/" in kind.path]
        trees = [read(path) for path in sorted(folder.rglob("errors.py"))]
        assert tree_faults(found, trees) == []


def test_every_error_has_a_code_of_its_own_and_says_what_happened(house: list[Kind]) -> None:
    assert len(house) > 40
    assert code_faults([kind for kind in house if "qmq_migrations" not in kind.path]) == []


TREE = '''"""Errors.

::

    QmqError            elsewhere
    ├── OneError …      elsewhere, too
    ├── TwoError        a branch
    │   └── ThreeError  a leaf
    └── FourError       a leaf
"""
'''
CLASSES = """
class TwoError(QmqError):
    "Two."
    code = "two"
class ThreeError(TwoError, ValueError):
    "Three."
    code = "three"
class FourError(QmqError):
    "Four."
    code = "four"
"""


def faults_of(tree: str, classes: str) -> list[str]:
    sources = [Source(path="errors.py", text=tree), Source(path="a.py", text=classes)]
    found = kinds(sources)
    return tree_faults(found, sources[:1]) + code_faults(found)


def test_planted_faults_are_found() -> None:
    assert faults_of(TREE, CLASSES) == []
    assert faults_of(TREE.replace("FourError ", "FiveError "), CLASSES) == [
        "a.py: FourError is drawn 0 times under its parent",
        "FiveError is drawn under QmqError",
    ]
    assert faults_of(TREE, CLASSES.replace("FourError(QmqError)", "FourError(TwoError)"))
    assert sorted(faults_of(TREE, CLASSES.replace('"four"', '"three"'))) == [
        "a.py: FourError has the code 'three'",
        "a.py: ThreeError has the code 'three'",
    ]
    assert faults_of(TREE, CLASSES.replace('    code = "four"\n', "")) == [
        "a.py: FourError has the code ''"
    ]
    assert faults_of(TREE, CLASSES.replace('    "Four."\n', "")) == ["a.py: FourError says nothing"]
