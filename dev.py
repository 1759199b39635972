#!/usr/bin/env python3
"""The commands of a developer: demo, test, check, bench, clean.

Needs nothing but Python 3.11: it makes the virtual environment `.venv` beside itself, installs the
project into it with what the command needs, and installs again only when pyproject.toml changed.
uv is used when it is there, pip otherwise. It is not a build system and knows no package index: where
packages come from is what the machine's own uv or pip was told.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info < (3, 11):  # noqa: UP036  # the one file that an older Python may be given
    sys.exit("dev.py: Python 3.11 or newer is needed")

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / "python"
#: What was installed: the hash of pyproject.toml and the names of the dependency groups.
STAMP = VENV / "installed.json"
LOG = ROOT / ".cache" / "install.log"
#: Enough of the log to hold one resolver message or one traceback.
LOG_LINES_SHOWN = 25
#: One worker for each core of the smallest machine the tests are meant for.
TEST_WORKERS = 2

CODE = (
    "qmq_client",
    "broker/qmq_broker",
    "watchdog/qmq_watchdog",
    "migrations/qmq_migrations",
    "pipeline/qmq_pipeline",
    "pipeline/pyspark_qmq",
    "pipeline/pyspark_qmq_outbox",
    "dev.py",
    "tests",
    "examples",
    "benchmarks",
    "hatch_build.py",
)
CACHES = (
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    ".import_linter_cache",
    ".hypothesis",
    ".cache",
    "build",
    "dist",
)


class DevError(Exception):
    """The command cannot go on; the message says what to do."""


class WrongCallError(DevError):
    """The command has no such argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of dev.py."""

    #: One line for the usage text.
    summary: str
    #: Dependency groups of pyproject.toml that it needs beside the project itself.
    groups: tuple[str, ...] = ()


COMMANDS = {
    "demo": Command(
        summary="run the demo of examples/flights; arguments go to it", groups=("drivers", "screen")
    ),
    "test": Command(summary="run pytest on all tests; arguments go to pytest", groups=("test",)),
    "check": Command(
        summary="lint, format, types, floors, tidy: all, or those named", groups=("test", "lint")
    ),
    "bench": Command(
        summary="run the benchmarks; arguments go to them", groups=("drivers", "screen")
    ),
    "clean": Command(summary="remove the caches and the virtual environment"),
}

#: Commands that are a module of the project, run where the caller stands.
MODULES = {"demo": "examples.flights", "bench": "benchmarks"}
#: `python -m` would look for the module where the caller stands.
RUN_MODULE = """\
import runpy, sys
sys.path[0], module = sys.argv[1:3]
del sys.argv[1:3]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; 2 for a wrong call."""
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(usage())
        return 0 if arguments else 2
    name, rest = arguments[0], list(arguments[1:])
    if name not in COMMANDS:
        print(f"dev.py: no command {name!r}\n\n{usage()}", file=sys.stderr)
        return 2
    if name == "clean" and not rest:
        return clean()
    if name not in MODULES:  # paths for pytest begin at the project, those for demo and bench here
        os.chdir(ROOT)
    # Tests, demo and benchmarks start hundreds of processes, each of which would compile all it imports.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Python 3.11 reads the path of an editable installation in the locale's encoding.
    if os.environ.get("LC_ALL") in {"C", "POSIX"}:
        os.environ["LC_ALL"] = "C.UTF-8"
    try:
        wishes = wishes_of(name, rest)
        prepare(COMMANDS[name].groups)
        prepare_if_possible(wishes)
        if name == "check":
            return check(rest)
    except DevError as error:
        print(f"dev.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, WrongCallError) else 1
    return become(command_line(name, rest))


def wishes_of(name: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the groups that this call does without where they cannot be had.

    A wrong call is refused here, before minutes are spent on an environment for it.
    """
    # Imported here: they are the commands' own options, and an older Python must not reach them.
    from benchmarks import options as bench
    from examples.flights import options as demo

    if name == "clean":
        raise WrongCallError(f"{name} takes no arguments; nothing was removed")
    if name == "check":
        refuse_unknown_checks(arguments)
    if name == "demo":
        return () if demo.parse(arguments).no_spark else ("spark",)
    if name == "bench":
        return () if bench.parse(arguments).list else ("spark",)
    return ()


def usage() -> str:
    """Return the usage text."""
    lines = [f"  {name:<6} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: python3 dev.py COMMAND [ARGUMENT …]", "", *lines])


def command_line(name: str, arguments: list[str]) -> list[str]:
    """Return what `demo`, `test` or `bench` runs inside the environment."""
    if name == "test":
        return [str(PYTHON), "-m", "pytest", *workers(arguments), *arguments]
    return [str(PYTHON), "-c", RUN_MODULE, str(ROOT), MODULES[name], *arguments]


def workers(arguments: Iterable[str]) -> list[str]:
    """Return xdist's option, unless the caller chose workers or plugins himself."""
    if any(argument.startswith(("-n", "--numprocesses", "-p")) for argument in arguments):
        return []
    return [
        "-n",
        str(TEST_WORKERS),
        "--dist",
        "loadgroup",
    ]  # tests/conftest.py says which are together


def become(line: list[str]) -> int:
    """Replace this process, so that signals reach the command and nobody else."""
    if os.name != "nt":
        os.execv(line[0], line)
    return subprocess.call(line)


# ---- check -------------------------------------------------------------------------------------


def checks() -> dict[str, list[str]]:
    """Return the command line of each check."""
    python = str(PYTHON)
    code = [path for path in CODE if has_python(ROOT / path)]
    return {
        "lint": [python, "-m", "ruff", "check", "."],
        "format": [python, "-m", "ruff", "format", "--check", "."],
        "types": [python, "-m", "mypy", "--num-workers", str(TEST_WORKERS), *code],
        "floors": [str(BIN / "lint-imports")],
        "tidy": [python, "-m", "pytest", "-q", *workers(()), "tests/tidy"],
    }


def refuse_unknown_checks(names: Iterable[str]) -> None:
    """Raise WrongCallError for a name that is no check's."""
    known = checks()
    if unknown := [name for name in names if name not in known]:
        raise WrongCallError(f"no check {unknown[0]!r}; there are: {', '.join(known)}")


def has_python(path: Path) -> bool:
    """Tell whether the path is a Python file or a folder with one."""
    return path.is_file() or any(path.rglob("*.py"))


def check(names: Sequence[str]) -> int:
    """Run every check, or those named, whatever the others say; 1 when one failed."""
    lines = checks()
    outcomes = {}
    for name in names or lines:
        print(f"\n── {name}: {' '.join(shown(lines[name]))}", flush=True)
        outcomes[name] = subprocess.call(lines[name], cwd=ROOT) == 0
    print()
    for name, is_good in outcomes.items():
        print(f"{name:<8}{'ok' if is_good else 'FAILED'}")
    return 0 if all(outcomes.values()) else 1


def shown(line: list[str]) -> list[str]:
    """Return the command line as a person would type it."""
    return [Path(line[0]).name, *line[1:]]


# ---- the environment ---------------------------------------------------------------------------


def prepare(groups: Iterable[str]) -> None:
    """Make the environment hold the project and the groups; quick when it already does."""
    text = (ROOT / "pyproject.toml").read_bytes()
    digest = hashlib.sha256(text).hexdigest()
    stamp = read_stamp()
    is_current = stamp.get("pyproject") == digest and PYTHON.exists()
    known = set(stamp.get("groups", ())) if is_current else set()
    if is_current and known.issuperset(groups):
        return
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text("")
    if not PYTHON.exists():
        make_environment()
    wanted = sorted(known.union(groups))
    print(
        f"dev.py: installing the project and {', '.join(wanted) or 'nothing else'} into {VENV.name}"
        f" (log: {LOG.relative_to(ROOT)})",
        flush=True,
    )
    requirements = group_requirements(text.decode(), wanted)
    logged(
        [*installer(), "--editable", str(ROOT), *requirements],
        "installing the project",
        QMQ_BUILD_KERNEL="0",  # an editable installation runs the sources
    )
    STAMP.write_text(json.dumps({"pyproject": digest, "groups": wanted}))


def prepare_if_possible(groups: Iterable[str]) -> None:
    """Add groups that the command can do without; it says itself what it then leaves out."""
    try:
        prepare(groups)
    except DevError as error:
        print(
            f"dev.py: going on without {', '.join(groups)}: {str(error).splitlines()[0].rstrip(':')}"
        )


def read_stamp() -> dict[str, Any]:
    """Return what the last installation left, or nothing."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def group_requirements(pyproject: str, groups: Iterable[str]) -> list[str]:
    """Return the requirements of dependency groups; pip knows `--group` only from 25.1 on."""
    import tomllib  # not above: an older Python must reach the message there

    tables = tomllib.loads(pyproject).get("dependency-groups", {})
    found: dict[str, None] = {}
    for group in groups:
        for entry in tables[group]:
            if isinstance(entry, dict):
                found.update(dict.fromkeys(group_requirements(pyproject, [entry["include-group"]])))
            else:
                found[entry] = None
    return list(found)


def find_uv() -> str | None:
    """Return uv from PATH or from the environment itself."""
    return shutil.which("uv") or shutil.which("uv", path=str(BIN))


def installer() -> list[str]:
    """Return the start of an install command."""
    if uv := find_uv():
        return [uv, "pip", "install", "--python", str(PYTHON)]
    return [str(PYTHON), "-m", "pip", "install"]


def make_environment() -> None:
    """Create `.venv`, by uv or by the standard library."""
    print(f"dev.py: making {VENV.name}", flush=True)
    if uv := shutil.which("uv"):
        logged(
            [uv, "venv", "--seed", "--clear", "--python", sys.executable, str(VENV)], "making .venv"
        )
        return
    if importlib.util.find_spec("ensurepip") is None:
        install_venv_package()
    logged([sys.executable, "-m", "venv", "--clear", str(VENV)], "making .venv")


def install_venv_package() -> None:
    """Install what Debian keeps apart from `python3` and a virtual environment needs."""
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    if not is_root or shutil.which("apt-get") is None:
        raise DevError(
            "this Python cannot make virtual environments (ensurepip is missing).\n"
            "On Debian and Ubuntu install it, then try again:\n\n"
            "    sudo apt-get update && sudo apt-get install -y python3-venv\n"
        )
    print("dev.py: installing python3-venv with apt-get", flush=True)
    logged(["apt-get", "update"], "reading Debian's package lists")
    logged(
        ["apt-get", "install", "-y", "--no-install-recommends", "python3-venv"],
        "installing python3-venv",
    )


def logged(line: list[str], purpose: str, **variables: str) -> None:
    """Run a command with its output in the log; when it fails show the end and where the rest is."""
    with LOG.open("a") as log:
        print("$", *line, file=log, flush=True)
        code = subprocess.call(
            line, cwd=ROOT, env={**os.environ, **variables}, stdout=log, stderr=subprocess.STDOUT
        )
    if code == 0:
        return
    tail = LOG.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    raise DevError(
        "\n".join([f"{purpose} failed (exit code {code}):", *tail, "", f"The whole log: {LOG}"])
        + "\nA half-made environment goes away with: python3 dev.py clean"
    )


def clean() -> int:
    """Remove everything that was made from the sources."""
    doomed = [ROOT / name for name in CACHES]
    doomed += ROOT.glob("*.egg-info")
    for folder in CODE:
        doomed += (ROOT / folder).rglob("__pycache__")
    for path in [*doomed, ROOT / "__pycache__", VENV]:
        shutil.rmtree(path, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
