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


def test_a_binary_file_in_a_clone_is_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".gitignore").write_text("")
    (tmp_path / "LICENSE").write_text("© they who wrote it\n")
    (tmp_path / "core").write_bytes(b"\x7fELF\xff\x00")
    (tmp_path / "broken.md").write_bytes(b"\xff no NUL: whoever wrote it has to hear of it")
    monkeypatch.setattr(house, "ROOT", tmp_path)
    with pytest.raises(UnicodeDecodeError):
        house.texts()
    (tmp_path / "broken.md").unlink()
    assert [source.name for source in house.texts()] == [".gitignore", "LICENSE"]


def test_a_file_that_an_editor_removes_while_the_tree_is_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept.py").write_text("a = 1\n")
    monkeypatch.setattr(house, "ROOT", tmp_path)
    monkeypatch.setattr(
        house, "files", lambda: iter([tmp_path / "saved~.py", tmp_path / "kept.py"])
    )
    assert [source.name for source in house.python()] == ["kept.py"]
    assert [source.name for source in house.texts()] == ["kept.py"]
