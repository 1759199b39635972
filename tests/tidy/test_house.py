"""Which files the other tests of this folder read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tidy import house


def test_what_was_made_in_a_clone_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".gitignore").write_bytes((house.ROOT / ".gitignore").read_bytes())
    written = tmp_path / "docs" / "page.md"
    made = [
        "broker-data/commitlog/0",
        "shop.db",
        "qmq.egg-info/PKG-INFO",
        "docs/__pycache__/page.pyc",
        ".git/HEAD",
        "venv/bin/python",
        "my environment/pyvenv.cfg",
        "my environment/lib/typing.py",
    ]
    for path in (written, *(tmp_path / name for name in made)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\xff")
    monkeypatch.setattr(house, "ROOT", tmp_path)
    assert {path.name for path in house.files()} == {".gitignore", "page.md"}
