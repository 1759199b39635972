"""Notices that the path of a SQLite database leads to another file than before.

A restore or a deployment may put another file in its place. A connection that is kept stays with the
old one, which has no name any more: it would be read and written forever, and nobody would see it.
"""

from __future__ import annotations

import os

from sqlalchemy.engine import URL


class SqliteFile:
    """The file of one database, looked at from time to time; for one thread at a time.

    Invariant: connections are opened after a look, so they are with the file of that look or a newer
    one. For databases that are no file it never changes.
    """

    def __init__(self, url: URL) -> None:
        path = url.database or ""
        is_file = url.get_backend_name() == "sqlite" and not path.startswith("file:")
        self._path = path if is_file and path != ":memory:" else ""
        self._seen = self._identity()

    def was_replaced(self) -> bool:
        """Whether the path leads to another file than at the last look; then close what is open."""
        seen, self._seen = self._seen, self._identity()
        return seen != self._seen

    def _identity(self) -> tuple[int, int] | None:
        """Device and inode; None if there is no file."""
        try:
            found = os.stat(self._path) if self._path else None
        except OSError:
            return None
        return None if found is None else (found.st_dev, found.st_ino)
