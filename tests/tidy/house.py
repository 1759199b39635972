"""Where the code and the pages are, for tests that read them instead of running them.

A rule of this folder is a function from one `Source` to the list of its faults, so that every rule can
be shown a planted fault. The tree is walked, not asked from git: the tests also run where git is not.
What `.gitignore` names is passed over, and so is every virtual environment, whatever its name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Import name of each package → its folder.
PACKAGES = {
    "qmq_client": ROOT / "qmq_client",
    "qmq_broker": ROOT / "broker" / "qmq_broker",
    "qmq_watchdog": ROOT / "watchdog" / "qmq_watchdog",
    "qmq_migrations": ROOT / "migrations" / "qmq_migrations",
    "qmq_pipeline": ROOT / "pipeline" / "qmq_pipeline",
    "pyspark_qmq": ROOT / "pipeline" / "pyspark_qmq",
    "pyspark_qmq_outbox": ROOT / "pipeline" / "pyspark_qmq_outbox",
}

#: What every virtual environment has in it.
ENVIRONMENT = "pyvenv.cfg"
TEXT = {".py", ".md", ".toml", ".sql", ".sh", ".yaml", ".yml", ".html", ".js", ".css", ".ini", ""}


@dataclass(frozen=True, kw_only=True)
class Source:
    """One text file of the repository, or one invented for the test of a rule."""

    #: Path from the repository's root, with forward slashes.
    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The file as a syntax tree."""
        return ast.parse(self.text, self.path)

    @property
    def name(self) -> str:
        """The file's name without its folder."""
        return self.path.rsplit("/", 1)[-1]


def made_names() -> list[str]:
    """Return names and patterns of what was made, not written."""
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    return [".git", *(line.rstrip("/") for line in lines if line and not line.startswith("#"))]


def files() -> Iterator[Path]:
    """Yield every file that was written by somebody, in a fixed order."""
    made, folders = made_names(), [ROOT]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if any(fnmatchcase(path.name, name) for name in made):
                continue
            if (path / ENVIRONMENT).exists():
                continue
            if path.is_dir() and not path.is_symlink():
                folders.append(path)
            elif path.is_file():
                yield path


def read(path: Path) -> Source:
    """Read one file of the repository; one that has not changed since is not read and parsed again."""
    found = path.stat()
    return _read(path, found.st_mtime_ns, found.st_size)


@cache
def _read(path: Path, _modified_ns: int, _bytes: int) -> Source:
    return Source(path=path.relative_to(ROOT).as_posix(), text=path.read_text(encoding="utf-8"))


def forget() -> None:
    """Read every file anew from now on; what was read so far and its trees are gone with this."""
    _read.cache_clear()


def texts() -> list[Source]:
    """Return every text file; one that only looks so by its name, as a core dump does, is none."""
    return _read_all(path for path in files() if path.suffix in TEXT and is_text(path))


def is_text(path: Path) -> bool:
    """Whether a file has no NUL in its beginning, which is what git asks of it; one that is gone is none."""
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(8_000)
    except FileNotFoundError:
        return False


def python() -> list[Source]:
    """Return every Python file."""
    return _read_all(path for path in files() if path.suffix == ".py")


def _read_all(paths: Iterable[Path]) -> list[Source]:
    """Read these files, but for those that are gone by now: whoever saves a file makes such beside it."""
    found = []
    for path in paths:
        with suppress(FileNotFoundError):
            found.append(read(path))
    return found


def product(package: str | None = None) -> list[Source]:
    """Return the Python files of one package, or of all, without what is made for tests."""
    folders = [PACKAGES[package]] if package else list(PACKAGES.values())
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [read(path) for path in paths if "testing" not in path.parts]


def pages() -> list[Source]:
    """Return the README and every page under docs."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [read(path) for path in paths if path.is_file()]
