"""The consumer id: which running member of a group this is."""

from __future__ import annotations

import os
import re
import secrets
import socket
from typing import Final

_HOST_CHARACTERS_MAX: Final = 60


def make_consumer_id() -> str:
    """Host, process id and a random part: readable, and never the same for two consumers."""
    host = re.sub(r"[^A-Za-z0-9_]", "_", socket.gethostname())[:_HOST_CHARACTERS_MAX]
    return f"{host or 'host'}-{os.getpid()}-{secrets.token_hex(4)}"
