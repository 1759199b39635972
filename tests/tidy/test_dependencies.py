"""X-26: each dependency has a reason, a lowest version and a licence that is written down."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import (
    Distribution,
    PackageNotFoundError,
    distribution,
    packages_distributions,
)
from typing import Any, Final

import pytest
from packaging.requirements import Requirement

from tests.tidy.house import ROOT, product

PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE: Final = (ROOT / "docs/decisions/0002-dependencies.md").read_text()
#: Text in a package's own description of its licence → the licence as the page has it. The first
#: that is found counts: a package under one of two is in the row of either.
LICENCES: Final = (
    ("LGPL", "LGPL-3.0"),
    ("GPL-2.0-or-later", "GPL-2.0"),
    ("General Public", "GPL-2.0 with the class path exception"),
    ("Mozilla", "MPL-2.0"),
    ("MPL", "MPL-2.0"),
    ("MIT", "MIT"),
    ("BSD", "BSD"),
    ("Apache", "Apache-2.0"),
    ("PSF", "PSF-2.0"),
)
#: Those whose first word in the list above is not their main one.
MAINLY: Final = {"prometheus-client": "Apache-2.0", "numpy": "BSD"}
_NO_NAME = re.compile(r"[^\w-]+")
_IN_BRACKETS = re.compile(r"\s*\([^)]*\)")


def spelled(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def direct(*, extras: bool) -> list[Requirement]:
    lists = PROJECT["optional-dependencies"].values() if extras else [PROJECT["dependencies"]]
    return [Requirement(text) for texts in lists for text in texts]


def brought_by(wanted: Iterable[Requirement]) -> dict[str, Distribution]:
    """What is installed of these and of all that they ask for in their turn."""
    found: dict[str, Distribution] = {}
    seen: set[str] = set()
    left = list(wanted)
    while left:
        requirement = left.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        try:
            known = distribution(requirement.name)
        except PackageNotFoundError:
            continue
        found[spelled(requirement.name)] = known
        for text in known.requires or ():
            asked = Requirement(text)
            extras = requirement.extras or {""}
            if asked.marker is None or any(asked.marker.evaluate({"extra": one}) for one in extras):
                left.append(asked)
    return found


def licence(package: Distribution) -> str:
    """The licence of a package by its own description."""
    about = package.metadata
    said = [one for one in about.get_all("Classifier") or () if one.startswith("License")]
    said = about.get_all("License-Expression") or said or about.get_all("License") or [""]
    text = " ".join(said)
    return next((name for part, name in LICENCES if part in text), f"unknown: {text[:40]}")


def listed() -> dict[str, tuple[str, bool]]:
    """Of each package on the page: its licence, and whether only an extra brings it."""
    found: dict[str, tuple[str, bool]] = {}
    rows = PAGE.partition("| Licence | Main set | Extras |")[2].partition("\n\n")[0]
    for row in rows.splitlines()[2:]:
        name, *packages = (cell.strip() for cell in row.strip("|").split("|"))
        for cell, is_extra in zip(packages, (False, True), strict=True):
            bare = _IN_BRACKETS.sub("", cell)
            found |= {one.strip(): (name, is_extra) for one in bare.split(",") if one.strip()}
    return found


@pytest.mark.parametrize("requirement", direct(extras=False) + direct(extras=True), ids=str)
def test_X_26_each_dependency_has_a_lowest_version_and_a_reason(requirement: Requirement) -> None:
    is_again = any(one.specifier for one in direct(extras=False) if one.name == requirement.name)
    assert is_again or {">=", "=="} & {one.operator for one in requirement.specifier}
    reasons = PAGE.partition("## Licences")[0].lower()
    assert requirement.name in _NO_NAME.split(reasons)


@pytest.mark.skipif(sys.platform != "linux", reason="the page tells of Linux")
def test_X_26_what_an_installation_brings_has_the_licences_that_are_written_down() -> None:
    main, page = brought_by(direct(extras=False)), listed()
    everything = main | brought_by(direct(extras=True))
    assert len(main) >= len(direct(extras=False))
    found = {
        name: (MAINLY.get(name) or licence(package), name not in main)
        for name, package in everything.items()
    }
    assert {name: page.get(name) for name in found} == found


def test_X_26_the_main_set_binds_nobody_to_more_than_naming_it() -> None:
    strict = {name for name, (kind, is_extra) in listed().items() if "GPL" in kind and not is_extra}
    assert listed()
    assert strict == set()


#: Loads every command, the watchdog's daemon and the broker with what is not asked for out of reach.
_LOAD_ALL: Final = """
import sys
from importlib.metadata import entry_points

refused = set(sys.argv[1:])

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Refusing())
for group in ("qmq.commands", "qmq.commands.broker"):
    for command in entry_points(group=group):
        command.load()
import qmq_broker.face.server, qmq_migrations, qmq_watchdog.service
"""


def test_X26_everything_starts_with_the_main_packages_alone() -> None:
    known = set(brought_by(direct(extras=False))) | {"qmq"}
    beside = {
        name
        for name, packages in packages_distributions().items()
        if not known & {spelled(one) for one in packages}
    }
    assert {"prometheus_client", "psycopg", "pyspark", "rich", "aiosqlite"} <= beside
    program = [sys.executable, "-c", _LOAD_ALL, *beside]
    ran = subprocess.run(program, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_X26_each_package_that_every_installation_brings_is_used() -> None:
    imported: set[str] = set()
    for source in product():
        for node in ast.walk(source.tree):
            match node:
                case ast.Import(names=names):
                    imported |= {one.name.partition(".")[0] for one in names}
                case ast.ImportFrom(module=str(module)):
                    imported.add(module.partition(".")[0])
    asked = {spelled(one.name) for one in direct(extras=False)}
    assert asked - imported == set()
