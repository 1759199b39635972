"""What `qmq consume` tells of a module that it cannot import: one line, with the places to look at."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qmq_client.commands.consume import load_target
from qmq_client.errors import ConfigurationError
from tests.client.consumer.kit import WAIT_S

Refusal = Callable[[str, str], str]
SETTINGS = """
import json

def load():
    return json.loads("{")
"""


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refusal:
    """What is said of a module of this name and text, seen from the directory it is in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def said(name: str, text: str) -> str:
        Path(f"{name}.py").write_text(text)
        with pytest.raises(ConfigurationError) as refused:
            load_target(name)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return str(refused.value)

    return said


def test_an_import_that_is_not_there_is_named_with_its_line(refusal: Refusal) -> None:
    said = refusal("imports_nothing", "\nimport no_such_thing")
    assert "imports no_such_thing, which is missing (imports_nothing.py:2)" in said
    assert "Install no_such_thing" in said


def test_an_error_is_reported_with_the_places_of_the_applications_own_files(
    refusal: Refusal,
) -> None:
    Path("settings_of_targets.py").write_text(SETTINGS)
    said = refusal("fails_below", "import settings_of_targets\nsettings_of_targets.load()")
    assert "was found, but its import failed: JSONDecodeError: Expecting property name" in said
    assert "(fails_below.py:2 > settings_of_targets.py:5 in load)" in said, "not json's own files"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("raises_value", "raise ValueError('no')", "ValueError: no (raises_value.py:1)"),
        ("has_no_name", "from json import nothing", "cannot import name 'nothing' from 'json'"),
        ("breaks_off", "\ndef x(:", "SyntaxError: invalid syntax (breaks_off.py:2)"),
        ("has_lines", "raise OSError('a\\nb' + 'c' * 999)", "OSError: a bccc"),
    ],
)
def test_whatever_a_module_raises_is_a_wrong_call_that_says_where(
    refusal: Refusal, name: str, text: str, told: str
) -> None:
    said = refusal(name, text)
    assert told in said
    assert len(said) < 600


@pytest.mark.parametrize("name", ["no_such_module", "os.nothing", "no_such_package.handlers"])
def test_a_module_that_is_not_there_is_not_called_broken(name: str) -> None:
    with pytest.raises(ConfigurationError, match="importable from here") as refused:
        load_target(name)
    assert "was found" not in str(refused.value)


def test_what_the_product_says_itself_passes_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
from qmq_client.errors import DatabaseUnavailableError
raise DatabaseUnavailableError("try again")
"""
    (tmp_path / "database_is_away.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Exception, match="try again") as raised:
        load_target("database_is_away")
    assert type(raised.value).__name__ == "DatabaseUnavailableError", "exit code 3, not 2"


@pytest.mark.parametrize(
    "target", ["../cons", "./cons.py", "dir/cons.py:handle", ".cons", "a\\cons"]
)
def test_a_path_in_place_of_a_module_is_answered_with_the_module(target: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_target(target)
    assert "is a path, not a module name" in str(refused.value)
    assert "and give cons, or give a dotted name" in str(refused.value)


@pytest.mark.parametrize("level", ["info", "debug"])
def test_the_command_prints_one_line_and_the_traceback_when_it_is_asked(
    tmp_path: Path, level: str
) -> None:
    (tmp_path / "shop.py").write_text("def load():\n    return 1 / 0\n\nload()\n")
    command = "from qmq_client.commands.root import root; root()"
    ended = subprocess.run(
        [sys.executable, "-c", command, "consume", "shop", "--log-level", level],
        check=False,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    *before, line = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert "ZeroDivisionError: division by zero (shop.py:4 > shop.py:2 in load)" in line
    assert any("Traceback" in text for text in before) == (level == "debug")
    assert before == [] or level == "debug"
