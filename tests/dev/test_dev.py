"""dev.py, the first thing a newcomer runs, on machines that have and lack this and that."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dev
from benchmarks import options as bench_options

PYPROJECT = """
[project]
name = "planted"
version = "1"
[dependency-groups]
test = ["pytest>=8", "hypothesis"]
lint = ["ruff", {include-group = "test"}, "pytest>=8"]
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let dev.py work on an empty project whose environment is this one's Python."""
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / ".venv").mkdir()
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    monkeypatch.setattr(dev, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(dev, "BIN", tmp_path / ".venv")
    monkeypatch.setattr(dev, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(dev, "STAMP", tmp_path / ".venv" / "installed.json")
    monkeypatch.setattr(dev, "LOG", tmp_path / ".cache" / "install.log")
    return tmp_path


@pytest.fixture
def installs(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the command lines that would be run."""
    lines: list[list[str]] = []
    monkeypatch.setattr(dev, "logged", lambda line, purpose, **_: lines.append(line))
    return lines


def test_a_group_is_its_requirements_and_those_of_the_groups_it_includes() -> None:
    assert dev.group_requirements(PYPROJECT, ["test"]) == ["pytest>=8", "hypothesis"]
    assert dev.group_requirements(PYPROJECT, ["lint"]) == ["ruff", "pytest>=8", "hypothesis"]
    assert dev.group_requirements(PYPROJECT, []) == []


def test_installs_once_until_pyproject_changes(root: Path, installs: list[list[str]]) -> None:
    dev.prepare(["test"])
    dev.prepare(["test"])
    dev.prepare([])
    assert [line[-4:] for line in installs] == [
        ["--editable", str(root), "pytest>=8", "hypothesis"]
    ]
    (root / "pyproject.toml").write_text(PYPROJECT + "# changed\n")
    dev.prepare(["test"])
    assert len(installs) == 2


def test_a_further_group_is_added_to_those_that_are_there(
    root: Path, installs: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    dev.prepare(["test"])
    dev.prepare(["lint"])
    dev.prepare(["test", "lint"])
    assert len(installs) == 2
    assert "installing the project and lint, test into" in capsys.readouterr().out
    assert {"ruff", "hypothesis"} <= set(installs[1])


def test_a_damaged_stamp_means_install_again(root: Path, installs: list[list[str]]) -> None:
    dev.prepare([])
    dev.STAMP.write_text("{")
    dev.prepare([])
    assert len(installs) == 2


def test_a_failed_installation_is_tried_again_and_shows_its_log(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = [sys.executable, "-c", "print('no such package'); raise SystemExit(3)"]
    monkeypatch.setattr(dev, "installer", lambda: failing)
    for _ in range(2):
        with pytest.raises(dev.DevError, match="no such package") as caught:
            dev.prepare([])
        assert str(dev.LOG) in str(caught.value)
        assert "exit code 3" in str(caught.value)


def test_what_a_command_can_do_without_is_reported_in_a_line_and_does_not_end_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = [sys.executable, "-c", "print('no such package'); raise SystemExit(3)"]
    monkeypatch.setattr(dev, "installer", lambda: failing)
    dev.prepare_if_possible(("test",))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "dev.py: going on without test: installing the project failed (exit code 3)"


def test_uv_is_taken_from_the_environment_and_pip_without_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(root))
    assert dev.installer() == [sys.executable, "-m", "pip", "install"]
    uv = root / ".venv" / "uv"
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    assert dev.installer() == [str(uv), "pip", "install", "--python", sys.executable]


def test_a_bare_debian_gets_python3_venv_first_when_root(
    installs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare_debian(monkeypatch, user=0)
    dev.make_environment()
    assert installs[0] == ["apt-get", "update"]
    assert "python3-venv" in installs[1]
    assert installs[2][1:3] == ["-m", "venv"]


def test_a_bare_debian_gets_the_command_when_not_root(
    installs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare_debian(monkeypatch, user=1000)
    with pytest.raises(dev.DevError, match="apt-get install -y python3-venv"):
        dev.make_environment()
    assert installs == []


def bare_debian(monkeypatch: pytest.MonkeyPatch, user: int) -> None:
    tools = {"apt-get": "/usr/bin/apt-get"}
    monkeypatch.setattr(shutil, "which", lambda name, path=None: tools.get(name))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(os, "geteuid", lambda: user)


def test_pytest_gets_two_workers_unless_the_caller_chose() -> None:
    assert dev.command_line("test", ["-k", "wire"])[-6:] == [
        *("-n", "2", "--dist", "loadgroup"),
        *("-k", "wire"),
    ]
    for chosen in (["-n", "4"], ["-n0"], ["--numprocesses=1"], ["-p", "no:xdist"]):
        assert dev.command_line("test", chosen)[3:] == chosen


def test_what_a_command_starts_may_keep_its_bytecode(
    installs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.chdir(Path.cwd())  # main changes to the project, and this goes back
    monkeypatch.setattr(dev, "check", lambda names: 0)
    assert dev.main(["check"]) == 0
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ


def test_arguments_are_passed_on() -> None:
    assert dev.command_line("demo", ["--count", "9"])[-2:] == ["--count", "9"]
    assert dev.command_line("bench", ["--quick"])[-1:] == ["--quick"]


@pytest.mark.parametrize(
    "call",
    [["demo", "--no-spark", "--json", "figures.json", "--keep", "kept"], ["bench", "--list"]],
)
def test_paths_of_the_demo_and_the_benchmarks_begin_where_the_caller_stands(
    call: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dev, "prepare", lambda groups: None)
    stood: list[Path] = []

    def become(line: list[str]) -> int:
        stood.append(Path.cwd())
        return 0

    monkeypatch.setattr(dev, "become", become)
    assert dev.main(call) == 0
    assert stood == [tmp_path]


@pytest.mark.parametrize("name", ["demo", "bench"])
def test_the_demo_and_the_benchmarks_are_found_from_anywhere(name: str, tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise SystemExit('not this one')")
    line = dev.command_line(name, ["--help"])
    outcome = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.startswith(f"usage: dev.py {name}")


def test_what_a_benchmark_starts_elsewhere_is_given_whole_paths() -> None:
    options = bench_options.parse(["--json", "a", "--pages", "b", "--directory", "c"])
    paths = options.json, options.pages, options.directory
    assert paths == tuple(Path.cwd() / name for name in "abc")


def test_check_runs_all_and_reports_each(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = [sys.executable, "-c", "raise SystemExit(1)"]
    good = [sys.executable, "-c", "print('looked')"]
    monkeypatch.setattr(dev, "checks", lambda: {"lint": bad, "types": good})
    assert dev.check([]) == 1
    output = capfd.readouterr().out
    assert "looked" in output
    assert "lint    FAILED" in output
    assert "types   ok" in output
    assert dev.check(["types"]) == 0


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (["demo", "--databse", "mariadb"], "unrecognized arguments: --databse"),
        (["demo", "--database", "oracle"], "invalid choice: 'oracle'"),
        (["demo", "--json", "nowhere/figures.json"], "nowhere/figures.json cannot be written"),
        (["demo", "--keep", "."], "is not an empty folder"),
        (["bench", "--quik"], "unrecognized arguments: --quik"),
        (["check", "spelling"], "no check 'spelling'; there are: lint, format"),
        (["clean", "--help"], "clean takes no arguments; nothing was removed"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_installed(
    call: list[str],
    complaint: str,
    root: Path,
    installs: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(root)
    monkeypatch.setattr(dev, "become", lambda line: 0)
    assert exit_code_of(call) == 2
    assert complaint in capsys.readouterr().err
    assert installs == []
    assert dev.VENV.is_dir()


def exit_code_of(call: list[str]) -> int | str | None:
    """What dev.py ends with, by itself or by argparse."""
    try:
        return dev.main(call)
    except SystemExit as end:
        return end.code


def test_spark_is_installed_unless_the_call_leaves_it_out() -> None:
    assert dev.wishes_of("demo", []) == ("spark",)
    assert dev.wishes_of("demo", ["--no-spark"]) == ()
    assert dev.wishes_of("bench", ["--list"]) == ()
    assert dev.wishes_of("test", ["--any", "argument"]) == ()


@pytest.mark.parametrize("module", ["examples.flights.options", "benchmarks.options"])
def test_a_call_is_read_with_the_standard_library_alone(module: str) -> None:
    line = [sys.executable, "-S", "-c", f"from {module} import parse; parse(['--help'])"]
    outcome = subprocess.run(line, capture_output=True, text=True, cwd=Path(dev.__file__).parent)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.startswith("usage: dev.py ")


def test_clean_leaves_what_was_written(root: Path) -> None:
    for made in (".pytest_cache", "tests/__pycache__", "build"):
        (root / made).mkdir(parents=True)
    (root / "tests" / "test_a.py").touch()
    assert dev.clean() == 0
    left = sorted(path.relative_to(root).as_posix() for path in root.rglob("*"))
    assert left == ["pyproject.toml", "tests", "tests/test_a.py"]


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0), (["deploy"], 2)])
def test_a_wrong_call_shows_the_usage(arguments: list[str], code: int) -> None:
    line = [sys.executable, dev.__file__, *arguments]
    outcome = subprocess.run(line, capture_output=True, text=True)
    assert outcome.returncode == code
    assert "usage: python3 dev.py COMMAND" in outcome.stdout + outcome.stderr
