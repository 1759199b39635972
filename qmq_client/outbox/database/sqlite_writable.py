"""Whether a SQLite file can be written here: the file, its journals, and its directory."""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from typing import Any, Final

#: Journals that stay between transactions, by mode, with their suffix. In other modes each
#: transaction creates one.
_JOURNALS: Final = {
    "wal": ("-wal", "-shm"),
    "truncate": ("-journal",),
    "persist": ("-journal",),
    "memory": (),
    "off": (),
}


def unwritable(path: str, journal_mode: str = "") -> str | None:
    """The file or directory that this process may not write, though a COMMIT would need it; or None.

    SQLite itself reports it only when a row is written, which may be long after the start. A
    journal is created in the directory, unless its mode keeps one there, or keeps it in memory.
    """
    journals = [path + end for end in _JOURNALS.get(journal_mode, ())]
    for each in (path, *journals):
        if os.path.exists(each) and not _may(each, os.W_OK):
            return each
    if journal_mode in _JOURNALS and all(map(os.path.exists, journals)):
        return None
    directory = os.path.dirname(path)
    return None if _may(directory, os.W_OK | os.X_OK) else directory


def read_only_error(path: str, refused: str) -> sqlite3.OperationalError:
    """The error for a file whose rows cannot be claimed, given the path from `unwritable`."""
    return sqlite3.OperationalError(
        f"{path} is read-only here, because {refused} is not writable for this user: no row can be "
        "claimed. Let it write the file and its directory"
    )


def _may(path: str, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def refuse_what_cannot_be_written(connection: Any) -> None:
    """Refuse read-only files before anything is claimed, as replicas are refused.

    `connection`: of the driver, or SQLAlchemy's adapter of an asynchronous one.
    """
    cursor = connection.cursor()
    cursor.execute("PRAGMA database_list")
    path = cursor.fetchone()[2]
    mode = ""
    with suppress(sqlite3.OperationalError):  # not even to be read, if a log is to be made for that
        cursor.execute("PRAGMA journal_mode")
        mode = cursor.fetchone()[0]
    cursor.close()
    if path and (refused := unwritable(path, mode)):
        connection.close()
        raise read_only_error(path, refused)
