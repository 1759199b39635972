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
        self.renew_in_child()

    def next_id(self) -> bytes:
        """A message id never given out before by anybody, 16 bytes."""
        return self._next_id()

    def _first_id(self) -> bytes:
        made = MessageIds(instance_of(secrets.randbits(64))).next_id
        # In one step, so no lock is needed: all threads take what the first of them made.
        self._next_id = self._made.setdefault("", made)
        return self._next_id()

    def renew_in_child(self) -> None:
        """After a fork: another instance.

        The process id is not asked for: in a namespace of its own a child may have the parent's, and it
        costs a system call for every message.
        """
        self._made: dict[str, Callable[[], bytes]] = {}
        self._next_id = self._first_id


def new_token() -> bytes:
    """A random owner token, 128 bits."""
    return secrets.token_bytes(TOKEN_BYTES)


MESSAGE_IDS: Final = IdSource()
os.register_at_fork(after_in_child=MESSAGE_IDS.renew_in_child)
