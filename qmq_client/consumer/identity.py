"""The consumer id: which running member of a group this is.

Two processes with one name would be one consumer to the broker: they would share the messages of a
broadcast. So a forked child has another generated name than its parent and its siblings, and every
process its own `instance`, by which the broker distinguishes two processes with the same given
name.
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
    """The name of a consumer: the given one, or one generated for this process."""

    __slots__ = ("__weakref__", "instance", "name")

    def __init__(self, name: str | None = None) -> None:
        self.name = name or make_consumer_id()
        #: Unique for this process and object, even with a given name.
        self.instance = _random_part()
        _IN_PROCESS.add(self)
        if name is None:
            _MADE_UP.add(self)


def make_consumer_id() -> str:
    """A name of host, process id and a random part: readable and unique."""
    host = re.sub(r"[^A-Za-z0-9_]", "_", socket.gethostname())[:_HOST_CHARACTERS_MAX]
    return f"{host or 'host'}-{os.getpid()}-{_random_part()}"


def _random_part() -> str:
    return secrets.token_hex(4)


def refuse_nameless(handlers: Iterable[Handler]) -> None:
    """Raise `ConfigurationError` for a named broadcast without a consumer id: its name must be the
    same after a restart.
    """
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
    for identity in list(_IN_PROCESS):
        identity.instance = _random_part()


_IN_PROCESS: Final[weakref.WeakSet[Identity]] = weakref.WeakSet()
_MADE_UP: Final[weakref.WeakSet[Identity]] = weakref.WeakSet()
os.register_at_fork(after_in_child=_rename_in_child)
