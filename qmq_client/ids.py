"""Message ids and tokens of this process.

The producer instance is drawn from the operating system at the first use and again in every forked
child, so two processes never share one. Safe for any number of threads.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Final

from qmq_client.wire.message_id import MessageIds, instance_of

TOKEN_BYTES: Final = 16


class IdSource:
    """Dense message ids of this process; a new instance number after a fork."""

    def __init__(self) -> None:
        #: By process id. Filled in one step, so no lock is needed.
        self._sources: dict[int, Callable[[], bytes]] = {}
        self._process_id = 0
        self._next_id = MessageIds(0).next_id

    def next_id(self) -> bytes:
        """A message id never given out before by anybody, 16 bytes."""
        if self._process_id != os.getpid():
            self._renew()
        return self._next_id()

    def _renew(self) -> None:
        process_id = os.getpid()
        made = MessageIds(instance_of(secrets.randbits(64))).next_id
        for other in [
            one for one in self._sources if one != process_id
        ]:  # a dead parent's may come again
            self._sources.pop(other, None)
        self._next_id = self._sources.setdefault(process_id, made)
        self._process_id = process_id  # last: a thread that sees it takes the new ids

    def renew_in_child(self) -> None:
        """After a fork: another instance.

        The process id alone does not tell a child: in a namespace of its own it may be the parent's. Nor does
        this hook: a server that forks in C, as uWSGI does, calls it only when told to.
        """
        self._sources = {}
        self._process_id = 0


def new_token() -> bytes:
    """A random owner token, 128 bits."""
    return secrets.token_bytes(TOKEN_BYTES)


MESSAGE_IDS: Final = IdSource()
os.register_at_fork(after_in_child=MESSAGE_IDS.renew_in_child)
