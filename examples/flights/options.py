"""The demo: a month of real flights through the whole product, with crashes on the way.

`python3 dev.py demo` runs it. Exit code 0 when every count is right, 1 when anything differs, a process
fails, or no server is to be had, 2 for a wrong call. Ctrl-C or SIGTERM ends every process of it.
"""

# Imports the standard library alone: dev.py reads a call with it before anything is installed.
from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

#: What `--database` takes, and what the ladder calls it.
KINDS = {"sqlite": "sqlite", "mariadb": "mysql", "postgresql": "postgresql"}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a call; a wrong one ends the process with 2, `--help` with 0."""
    parser = argparse.ArgumentParser(prog="dev.py demo", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--month", type=int, choices=range(1, 13), default=1, help="which month of 2013 (1)"
    )
    which.add_argument("--all", action="store_true", help="the whole year: 336,776 flights")
    parser.add_argument(
        "--days",
        type=int,
        choices=range(3, 32),
        default=31,
        metavar="N",
        help="only the first N days of a month, 3 to 31 (31)",
    )
    parser.add_argument(
        "--database",
        choices=tuple(KINDS),
        default="sqlite",
        help="where the services keep their tables; a server is found or started (sqlite)",
    )
    parser.add_argument(
        "--no-spark", action="store_true", help="leave out the audit and the report by Spark"
    )
    parser.add_argument(
        "--json", type=_new_file, metavar="FILE", help="write the figures for programs"
    )
    parser.add_argument(
        "--keep", type=_empty_folder, metavar="DIR", help="leave files, logs and history there"
    )
    return parser.parse_args(arguments)


def _new_file(text: str) -> Path:
    """Refused now, not when the run is over."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} cannot be written; name a file in a folder there is"
        )
    return path


def _empty_folder(text: str) -> Path:
    path = Path(text)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise argparse.ArgumentTypeError(f"{text} is not an empty folder; name a new one")
    return path
