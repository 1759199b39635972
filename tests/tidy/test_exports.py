"""The `__init__` of a package says what the package offers, and nothing else.

The order of `__all__` is held by ruff (RUF022), which also mends it.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import pytest

from tests.tidy.house import PACKAGES


def faces() -> list[str]:
    """Return the import name of every package and sub-package."""
    names = []
    for package, folder in PACKAGES.items():
        for init in sorted(folder.rglob("__init__.py")):
            names.append(".".join([package, *init.parent.relative_to(folder).parts]))
    return names


def export_faults(module: types.ModuleType) -> list[str]:
    promised = getattr(module, "__all__", [])
    faults = [f"{name} is promised, not there" for name in promised if not hasattr(module, name)]
    if len(set(promised)) != len(promised):
        faults.append("a name is promised twice")
    for name, value in vars(module).items():
        is_own_module = isinstance(value, types.ModuleType) and value.__name__ == (
            f"{module.__name__}.{name}"
        )
        is_private = name.startswith("_") or name == "annotations"
        if not (is_private or is_own_module or name in promised):
            faults.append(f"{name} is there, not promised")
    return faults


@pytest.mark.parametrize("name", faces())
def test_a_package_offers_exactly_what_it_promises(name: str) -> None:
    assert export_faults(importlib.import_module(name)) == []


def test_the_faces_are_found() -> None:
    assert {"qmq_client", "qmq_client.wire", "qmq_broker.storage"} <= set(faces())


def test_a_planted_wrong_face_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "planted_face"
    folder.mkdir()
    (folder / "part.py").write_text("A = B = 1\n")
    (folder / "__init__.py").write_text(
        "import os\nfrom planted_face.part import A, B\n__all__ = ['A', 'A', 'C']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("planted_face")
    for name in ("planted_face", "planted_face.part"):
        monkeypatch.delitem(sys.modules, name)
    assert export_faults(module) == [
        "C is promised, not there",
        "a name is promised twice",
        "os is there, not promised",
        "B is there, not promised",
    ]
