"""Ports of servers that end and come back at the same address."""

from __future__ import annotations

import random
import socket
from typing import Final

#: Below those that systems give out by themselves (Linux from 32768 on, others from 49152 on), to whoever
#: listens on port 0 and to every outgoing connection: such a one may be gone when its server comes back.
_FIRST: Final = 15_000
_NEXT: Final = 30_000


def free_port() -> int:
    """A port that was free a moment ago, and that only somebody who asks for it by its number can take."""
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(_FIRST, _NEXT)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
