"""Decodes JSON into an application's types, safely for any number of threads.

msgspec reads a struct's annotations at the first use of the type and stores its partial result
where other threads find it. If another thread decodes the same type meanwhile, it follows an empty
entry, and the process crashes (SIGSEGV, seen with 0.22 in consumers at their first messages). So
only one thread at a time creates a decoder, and a finished decoder is used without a lock.
"""

from __future__ import annotations

import os
import threading
from functools import lru_cache, partial
from typing import Any, Final

import msgspec

#: Most cached decoders; beyond this number one is created again.
DECODERS_MAX: Final = 1024
#: How long a fork waits for a decoder, which takes milliseconds. Bounded, because the thread that
#: creates it may wait for the thread that forks.
_FORK_S_MAX: Final = 5.0


#: Held while a decoder is created. Reentrant, because evaluating annotations may run the application's code.
_MAKING: Final = threading.RLock()
# A fork takes the lock, too: otherwise a child could inherit it locked forever, with a
# half-initialized type. All three callbacks are C functions, because in Python code a signal
# handler could raise between two steps and leave it locked.
os.register_at_fork(
    before=partial(_MAKING.acquire, timeout=_FORK_S_MAX),
    after_in_parent=_MAKING.release,
    after_in_child=_MAKING._at_fork_reinit,  # type: ignore[attr-defined]  # as the standard library does
)


def json_as(data: bytes, kind: Any) -> Any:
    """Decode a value of type `kind`; raises the errors of `msgspec.json.decode`."""
    try:
        decoder = _kept_decoder(kind)
    except (
        TypeError
    ):  # a type without a hash, or one that cannot be decoded: then this raises the error
        decoder = json_decoder(kind)
    return decoder.decode(data)


def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """A new decoder for type `kind`; raises `TypeError` for a type that cannot be decoded."""
    with _MAKING:
        return msgspec.json.Decoder(kind)


@lru_cache(maxsize=DECODERS_MAX)
def _kept_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return json_decoder(kind)
