"""A process that may not write where it should: also for root, who may do everything."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import sqlalchemy as sa

from qmq_client.outbox.table import create_tables

#: The user with no rights of its own, on every Unix.
_NOBODY: Final = 65_534
_EVERYBODY_READS: Final = 0o755


@contextmanager
def a_directory_of_root() -> Iterator[Path]:
    """Everybody may read it; pytest's own are closed to other users."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, _EVERYBODY_READS)
        yield Path(name)


@contextmanager
def as_nobody() -> Iterator[None]:
    """This process has no more rights than those of everybody; without root it has its own.

    Requires: what runs inside was run before. Python's modules may be closed to everybody, too.
    """
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def a_database_in(folder: Path, journal_mode: str) -> Path:
    """A file with our tables."""
    path = folder / "shop.db"
    engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.NullPool)
    create_tables(engine)
    with engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA journal_mode = {journal_mode}")
    return path


def let_nobody_write(path: Path, what: str) -> None:
    """The "file", or else its directory."""
    is_file = what == "file"
    os.chmod(path, 0o444 if is_file else 0o666)
    os.chmod(path.parent, 0o777 if is_file else 0o555)


def let_everybody_write(folder: Path) -> None:
    """Also what SQLite has made there meanwhile, as little writable as the file."""
    os.chmod(folder, 0o777)
    for path in folder.iterdir():
        os.chmod(path, 0o666)
