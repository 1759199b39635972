"""The consumer id: which running member of a group this is.

Two processes under one made-up name would be one consumer to the broker: they would share what a
broadcast gives to each, and each would pass for the other's sign of life. So a forked child has
another name than its parent and its siblings.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import weakref
from collections.abc import Iterable
from typing import Final

from qmq_client.consumer.handler import Handler
from qmq_client.errors import ConfigurationError

_HOST_CHARACTERS_MAX: Final = 60


class Identity:
    """What a consumer is called: as it was named, or by a name made up for this process."""

    __slots__ = ("__weakref__", "name")

    def __init__(self, name: str | None = None) -> None:
        self.name = name or make_consumer_id()
        if name is None:
            _MADE_UP.add(self)


def make_consumer_id() -> str:
    """Host, process id and a random part: readable, and never the same for two consumers."""
    host = re.sub(r"[^A-Za-z0-9_]", "_", socket.gethostname())[:_HOST_CHARACTERS_MAX]
    return f"{host or 'host'}-{os.getpid()}-{secrets.token_hex(4)}"


def refuse_nameless(handlers: Iterable[Handler]) -> None:
    """A named broadcast is kept for its consumer's name, which must be the same the next time."""
    for handler in handlers:
        if handler.options.broadcast == "named":
            raise ConfigurationError(
                setting="consumer_id",
                value=f"none, and {handler.options.name} is a named broadcast",
                remedy="Give Consumers(…, consumer_id=…) or `qmq consume --consumer-id`: one name "
                "for each instance, the same after a restart.",
            )


def _rename_in_child() -> None:
    for identity in list(_MADE_UP):
        identity.name = make_consumer_id()


_MADE_UP: Final[weakref.WeakSet[Identity]] = weakref.WeakSet()
os.register_at_fork(after_in_child=_rename_in_child)
