"""Drivers of SQLAlchemy that applications use, by kind of database, and an environment for each.

Most of them stand among the packages of the tests. mysqlclient is compiled where it is installed, and
aiomysql cannot bind bytes beside the PyMySQL of the others: each of these is installed into a folder of
its own, and tests that need it run in a process that looks there first.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy.engine import make_url

from tests.kit.surroundings import for_packages
from tests.services import packages
from tests.services.mysql import WITHOUT_TLS
from tests.services.rungs import RungError

if TYPE_CHECKING:
    pass

ROOT: Final = Path(__file__).resolve().parents[2]
#: `dev.py clean` removes it.
_FOLDER: Final = ROOT / ".cache" / "drivers"
_INSTALL_S_MAX: Final = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """One driver, synchronous or not; psycopg is both, and so twice in the table."""

    kind: str
    #: As it stands in a URL behind the `+`.
    name: str
    #: What is imported.
    module: str
    is_async: bool = False
    #: Requirements of an environment of its own; empty when it stands among the others.
    apart: tuple[str, ...] = ()
    #: Packages of Debian that its installation needs.
    debian: tuple[str, ...] = ()

    def __str__(self) -> str:
        """For names of tests."""
        return f"{self.name}{' async' if self.is_async and self.name == 'psycopg' else ''}"

    def url(self, url: str) -> str:
        """The same database by this driver."""
        made = make_url(url).set(drivername=f"{self.kind}+{self.name}")
        if self.name != "pymysql":
            made = made.difference_update_query([WITHOUT_TLS])  # an option of PyMySQL
        return made.render_as_string(hide_password=False)

    @property
    def is_here(self) -> bool:
        """Whether this process can use it."""
        if importlib.util.find_spec(self.module) is None:
            return False
        return self.module != "aiomysql" or version("pymysql") < "1.2"


#: The first of its kind with and without a loop is the main one, on which all tests run.
DRIVERS: Final = (
    Driver(kind="sqlite", name="pysqlite", module="sqlite3"),
    Driver(kind="sqlite", name="aiosqlite", module="aiosqlite", is_async=True),
    Driver(kind="mysql", name="pymysql", module="pymysql"),
    Driver(
        kind="mysql",
        name="mysqldb",
        module="MySQLdb",
        apart=("mysqlclient>=2.2",),
        debian=("gcc", "pkg-config", "python3-dev", "libmariadb-dev"),
    ),
    Driver(kind="mysql", name="asyncmy", module="asyncmy", is_async=True),
    Driver(
        kind="mysql",
        name="aiomysql",
        module="aiomysql",
        is_async=True,
        apart=("aiomysql>=0.2", "pymysql<1.2"),
    ),
    Driver(kind="postgresql", name="psycopg", module="psycopg"),
    Driver(kind="postgresql", name="psycopg2", module="psycopg2"),
    Driver(kind="postgresql", name="pg8000", module="pg8000"),
    Driver(kind="postgresql", name="psycopg", module="psycopg", is_async=True),
    Driver(kind="postgresql", name="asyncpg", module="asyncpg", is_async=True),
)
MAIN: Final = {"pysqlite", "aiosqlite", "pymysql", "asyncmy", "psycopg"}


def drivers(*, is_async: bool | None = None) -> list[Driver]:
    """Those that this process can use; all, or of one way only."""
    return [one for one in DRIVERS if one.is_here and is_async in (None, one.is_async)]


def drivers_apart() -> list[Driver]:
    """Those that need an environment of their own and are not in it."""
    return [one for one in DRIVERS if one.apart and not one.is_here]


def environment_apart(requirements: Sequence[str], debian: Sequence[str] = ()) -> dict[str, str]:
    """Variables for a process that finds these packages before those of the tests; installed once.

    Raises `RungError` where they cannot be had.
    """
    name = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()[:16]
    folder = _FOLDER / name
    with packages.locked(_FOLDER / "lock"):
        if not folder.exists():
            for package in debian:
                if not _is_installed(package):
                    packages.install(package, is_there=partial(_is_installed, package))
            _install(requirements, folder)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    return {**kept, "PYTHONPATH": str(folder)}


def _install(requirements: Sequence[str], folder: Path) -> None:
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(unfinished)]
    done = subprocess.run(
        [*line, *requirements],
        env=for_packages(os.environ),
        capture_output=True,
        text=True,
        timeout=_INSTALL_S_MAX,
    )
    if done.returncode:
        said = " ".join(done.stderr.split())[-300:]
        raise RungError(f"{', '.join(requirements)} cannot be installed: {said}")
    unfinished.rename(folder)


def _is_installed(package: str) -> bool:
    if shutil.which("dpkg-query") is None:
        return False
    line = ["dpkg-query", "--show", "--showformat=${Status}", package]
    done = subprocess.run(line, capture_output=True, text=True)
    return done.stdout.endswith(" installed")
