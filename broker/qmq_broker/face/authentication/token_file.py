"""The tokens file: read by the broker while it runs, written by `qmq broker token`.

A broker started with a tokens file never serves without tokens: if the file vanishes or becomes
invalid, the broker logs an error and keeps the last tokens until the file is valid again. Commands
replace the file atomically, one command at a time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from qmq_broker.errors import LockedError
from qmq_broker.face.authentication.outside_files import Stamp, read_bounded, stamp_of
from qmq_broker.face.authentication.tokens import (
    FILE_BYTES_MAX,
    TokenList,
    Tokens,
    decode_tokens,
    encode_tokens,
)
from qmq_broker.face.logs import log_event
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.small_file import replace_whole
from qmq_client.wire.errors import QmqError

_LOG: Final = logging.getLogger(__name__)
#: Differs from the stamp of every file.
_NO_STAMP: Final[Stamp] = (-1, -1, -1, -1, -1)
_LOCK_SUFFIX: Final = ".lock"
_DRAFT_SUFFIX: Final = ".draft"


@dataclass(kw_only=True, eq=False, repr=False)
class TokenFileError(QmqError):
    """The tokens file cannot be used."""

    path: str
    reason: str
    remedy: str = "Restore it from a copy, or create a new one with `qmq broker token add`."

    code = "tokens_file"
    text = "tokens file {path}: {reason}. {remedy}"


class WatchedTokens:
    """The tokens of a file, read again after each change. Belongs to the loop thread."""

    def __init__(self, path: str) -> None:
        """Reads the file; raises `TokenFileError` if that fails."""
        self._path = path
        # Taken before the content is read: the first step then sees a change in between.
        self._stamp: Stamp | None = _stamp(path)
        self.current = Tokens(read_tokens(path).tokens)

    def forget(self) -> None:
        """Make the next step read the file, even if unchanged."""
        self._stamp = _NO_STAMP

    def step(self) -> bool:
        """Check the file once; returns whether the tokens were replaced."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.current = Tokens(read_tokens(self._path).tokens)
        except TokenFileError as error:
            log_event(
                _LOG, logging.ERROR, "tokens_not_read", reason=error, kept=len(self.current.entries)
            )
            return False
        log_event(_LOG, logging.INFO, "tokens_read", tokens=len(self.current.entries))
        return True


def _stamp(path: str) -> Stamp | None:
    try:
        return stamp_of(path)
    except OSError:
        return None  # `read_tokens` reports the reason


def read_tokens(path: str) -> TokenList:
    """The tokens in the file; raises `TokenFileError`."""
    try:
        return decode_tokens(read_bounded(path, FILE_BYTES_MAX))
    except FileNotFoundError as error:
        remedy = f"Create it with `qmq broker token add --tokens {path}`."
        raise TokenFileError(path=path, reason="it does not exist", remedy=remedy) from error
    except OSError as error:
        raise TokenFileError(path=path, reason=error.strerror or str(error)) from error
    except ValueError as error:
        raise TokenFileError(path=path, reason=str(error)) from error


def change_tokens(path: str, change: Callable[[TokenList], TokenList]) -> TokenList:
    """Read, change and replace the file, which is created if missing; durable on return.

    Raises `TokenFileError` if it cannot be read or another command is changing it, `StoreError` if
    it cannot be written.
    """
    directory, name = os.path.split(os.path.abspath(path))
    disk = OsDisk(directory)
    try:
        with _alone(disk, name, path):
            listed = read_tokens(path) if name in disk.names("") else TokenList()
            changed = change(listed)
            replace_whole(disk, name, [encode_tokens(changed)], draft=name + _DRAFT_SUFFIX)
            return changed
    finally:
        disk.close()


@contextmanager
def _alone(disk: OsDisk, name: str, path: str) -> Iterator[None]:
    try:
        lock = disk.lock(name + _LOCK_SUFFIX, f"pid {os.getpid()}")
    except LockedError as error:
        remedy = "Run this command again when the other one has ended."
        reason = "another command is changing it"
        raise TokenFileError(path=path, reason=reason, remedy=remedy) from error
    try:
        yield
    finally:
        lock.release()
