"""The only place that translates an `OSError` into an error of the broker."""

from __future__ import annotations

import errno
from typing import Final

from qmq_broker.errors import DiskError, DiskFullError, FilesFullError, StoreError

#: The remedies when there is no room.
_FULL: Final = {
    errno.ENOSPC: "Make room on the disk.",
    errno.EDQUOT: "Make room below this quota, or raise it: the free space of the disk does not show it.",
}
_FILES_FULL: Final = frozenset({errno.EMFILE, errno.ENFILE})
#: Missing rights. A read-only file system gives another error.
_NOT_PERMITTED: Final = frozenset({errno.EACCES, errno.EPERM})
#: Errors of a file system without locks.
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})


def translate(error: OSError, operation: str, path: str) -> StoreError:
    """The error for a call that failed on a path below the data directory."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return DiskFullError(f"{operation} of {path}: {reason}. {_FULL[error.errno]}")
    if error.errno in _FILES_FULL:
        return FilesFullError(f"{operation} of {path}: {reason}. Raise the limit of open files.")
    if error.errno == errno.ELOOP:
        reason += " (symbolic links are not followed below the data directory)"
    if error.errno == errno.EROFS:
        reason += (
            " (the system's log has the reason; check the file system and mount it for writing)"
        )
    if error.errno in _NOT_PERMITTED:
        reason += " (run this as the user who owns the data directory)"
    if operation == "lock" and error.errno in _NO_LOCKS:
        reason += " (this file system cannot lock out a second broker: use a local one)"
    return DiskError(operation=operation, path=path or ".", reason=reason)
