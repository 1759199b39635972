"""Detects that the path of a SQLite database leads to another file than before.

A restore or a deployment may replace the file. A pooled connection stays with the old file, which
has no name any more: other processes do not see what it reads and writes.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Final
from weakref import WeakSet

import sqlalchemy as sa
from sqlalchemy import event

_log = logging.getLogger("qmq.database")
#: Key in a connection's `info`: device and inode of the file that it was opened with.
_FILE: Final = "qmq_sqlite_file"
_followed: Final[WeakSet[sa.Engine]] = WeakSet()


def follow_file(engine: sa.Engine) -> None:
    """Make this engine's pool return only connections to the file at its current path.

    Does nothing for databases that are not files, and may be repeated. Costs one `stat` each time a
    connection is taken.
    """
    path = engine.url.database or ""
    is_file = engine.dialect.name == "sqlite" and path not in ("", ":memory:")
    if not is_file or path.startswith("file:") or engine in _followed:
        return
    _followed.add(engine)

    def note(_: object, entry: Any) -> None:
        entry.info.setdefault(_FILE, _identity(path))

    def note_before(_: object, entry: Any, *__: object) -> None:
        # Read before it is opened: if the file is replaced meanwhile, the connection is opened again.
        entry.info[_FILE] = _identity(path)

    def check(_: object, entry: Any, __: object) -> None:
        opened, now = entry.info.get(_FILE), _identity(path)
        if opened is not None and opened != now:
            _log.warning(
                "the SQLite file %s was replaced or removed: connections to it are closed", path
            )
            raise sa.exc.InvalidatePoolError("the file was replaced")

    event.listen(engine, "do_connect", note_before)
    event.listen(engine, "connect", note)  # an engine with a `creator` does not call the first
    event.listen(engine, "checkout", check)


def _identity(path: str) -> tuple[int, int] | None:
    """Device and inode; None if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
