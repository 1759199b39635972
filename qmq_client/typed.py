"""Decodes JSON into an application's types, safely for any number of threads.

msgspec reads a struct's annotations at the first use of the type and keeps its partial result where
other threads find it. A thread that decodes the same type meanwhile follows an empty entry, and the
whole process dies (SIGSEGV, seen with 0.22 in consumers at their first messages). So only one
thread at a time makes a decoder, and a finished decoder is used without a lock.
"""

from __future__ import annotations

import os
import threading
from functools import lru_cache, partial
from typing import Any, Final

import msgspec

#: Types of one program; beyond this number a decoder is made again.
DECODERS_MAX: Final = 1024
#: How long a fork waits for a decoder, which takes milliseconds. Bounded, because what makes it may
#: wait for the thread that forks.
_FORK_S_MAX: Final = 5.0


#: Held while a decoder is made. Reentrant: evaluating annotations may run the application's code.
_MAKING: Final = threading.RLock()
# A fork takes the lock, too: a child could inherit it locked forever, and a type that is half
# known for good. None of the three is written in Python, where a signal handler could raise between
# two steps and leave it locked.
os.register_at_fork(
    before=partial(_MAKING.acquire, timeout=_FORK_S_MAX),
    after_in_parent=_MAKING.release,
    after_in_child=_MAKING._at_fork_reinit,  # type: ignore[attr-defined]  # as the standard library does
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
    with _MAKING:
        return msgspec.json.Decoder(kind)


@lru_cache(maxsize=DECODERS_MAX)
def _kept_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return json_decoder(kind)
