"""The operator's files outside the data directory, which may change while the broker runs.

Tokens and certificates are checked regularly and read after a change, so that a rotation needs no
restart. A new token may be written to a new file. For files in the data directory see
`storage/files/disk.py`.
"""

from __future__ import annotations

import os
import stat

#: Differs after every change of a file: device, inode, length, time of writing, and time of the
#: last change of rights, because a file may be refused because of its rights.
Stamp = tuple[int, int, int, int, int]


def stamp_of(path: str) -> Stamp | None:
    """The file's stamp, following links; None if there is no such file. Raises `OSError`."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read_bounded(path: str, bytes_max: int) -> bytes:
    """Read a whole file.

    Raises `OSError`; `ValueError` if it is not a regular file, writable by everybody, or too long.
    """
    # Without O_NONBLOCK the open of a named pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a regular file")
        if found.st_mode & stat.S_IWOTH:
            raise ValueError("every user may write it; remove that right (chmod o-w)")
        if found.st_size > bytes_max:
            raise ValueError(f"{found.st_size} bytes; allowed: {bytes_max}")
        return file.read(bytes_max)


def write_new(path: str, data: bytes) -> None:
    """Create a file that only its owner may read, completely or not at all.

    Raises `OSError`, including `FileExistsError` if there already is one.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except OSError:
        remove(path)
        raise


def remove(path: str) -> None:
    """Remove a file that `write_new` created. Raises `OSError`."""
    os.unlink(path)
