"""Generates message ids and owner tokens.

The producer instance is drawn from the operating system at the first use and again in every forked
child, so two processes never share one. Safe for any number of threads.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from qmq_client.wire.message_id import MessageIds, instance_of

TOKEN_BYTES: Final = 16


#: madvise(2), Linux 4.14: a child finds zeros there. The standard library has no name for it.
_WIPE_ON_FORK: Final = 18


class Mark(Protocol):
    """One byte."""

    def __getitem__(self, place: int, /) -> int: ...

    def __setitem__(self, place: int, value: int, /) -> None: ...


class ProcessIdMark:
    """A mark by process id, where memory cannot be wiped: each look is a system call."""

    def __init__(self) -> None:
        self._process_id = 0

    def __getitem__(self, _: int, /) -> int:
        return self._process_id == os.getpid()

    def __setitem__(self, _: int, value: int, /) -> None:
        self._process_id = value and os.getpid()


def fork_mark() -> Mark:
    """A byte that is 0 until it is set in this process, and 0 again in a forked child, also without hooks."""
    if sys.platform == "linux":
        mark = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # an older kernel, or one that is imitated
            mark.madvise(_WIPE_ON_FORK)
            return mark
    return ProcessIdMark()


class IdSource:
    """Dense message ids of this process; a new instance number after a fork."""

    def __init__(self) -> None:
        #: Ids by process id. Set in one step, so no lock is needed.
        self._sources: dict[int, Callable[[], bytes]] = {}
        self._mark = fork_mark()
        self._next_id = MessageIds(0).next_id

    def next_id(self) -> bytes:
        """A new unique message id, 16 bytes."""
        if not self._mark[0]:
            self._renew()
        return self._next_id()

    def _renew(self) -> None:
        process_id = os.getpid()
        made = MessageIds(instance_of(secrets.randbits(64))).next_id
        for other in [
            one for one in self._sources if one != process_id
        ]:  # a process id of a dead parent may be reused
            self._sources.pop(other, None)
        self._next_id = self._sources.setdefault(process_id, made)
        self._mark[0] = 1  # last, so that a thread that sees it uses the new ids

    def renew_in_child(self) -> None:
        """Choose a new instance after a fork.

        The process id alone does not identify a child: in another namespace it may equal the
        parent's. Neither does this hook: a server that forks in C, like uWSGI, calls it only if
        configured.
        """
        self._sources = {}
        self._mark[0] = 0


def new_token() -> bytes:
    """A random owner token, 128 bits."""
    return secrets.token_bytes(TOKEN_BYTES)


MESSAGE_IDS: Final = IdSource()
os.register_at_fork(after_in_child=MESSAGE_IDS.renew_in_child)
