"""Decodes JSON into an application's types, safely for any number of threads.

msgspec reads a struct's annotations at the first use of the type and keeps its partial result where
other threads find it. A thread that decodes the same type meanwhile follows an empty entry, and the
whole process dies (SIGSEGV, seen with 0.22 in consumers at their first messages). So only one
thread at a time makes a decoder, and a finished decoder is used without a lock.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

import msgspec

#: Types of one program; beyond this number a decoder is made again.
DECODERS_MAX: Final = 1024
#: How long a fork waits for a decoder, which takes milliseconds. Bounded, because what makes it may
#: wait for the thread that forks.
_FORK_S_MAX: Final = 5.0


class _Making:
    """Whose turn it is to make a decoder. A fork takes its turn, too.

    Otherwise a child could inherit a turn that nobody gives back, and a type that is half known for
    good.
    """

    def __init__(self) -> None:
        #: Reentrant: evaluating annotations may run the application's code.
        self.turn = threading.RLock()

    def before_fork(self) -> None:
        self.turn.acquire(timeout=_FORK_S_MAX)

    def after_fork(self) -> None:
        with suppress(RuntimeError):  # it had not become this thread's
            self.turn.release()

    def after_fork_in_child(self) -> None:
        self.turn = threading.RLock()


_MAKING: Final = _Making()
os.register_at_fork(
    before=_MAKING.before_fork,
    after_in_parent=_MAKING.after_fork,
    after_in_child=_MAKING.after_fork_in_child,
)


def json_as(data: bytes, kind: Any) -> Any:
    """A value of type `kind`; raises what `msgspec.json.decode` does."""
    try:
        decoder = _kept_decoder(kind)
    except TypeError:  # a type that has no hash, or none that can be decoded: then this says so
        decoder = json_decoder(kind)
    return decoder.decode(data)


def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """A decoder of its own for type `kind`; raises `TypeError` for what cannot be decoded."""
    with _MAKING.turn:
        return msgspec.json.Decoder(kind)


@lru_cache(maxsize=DECODERS_MAX)
def _kept_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return json_decoder(kind)
