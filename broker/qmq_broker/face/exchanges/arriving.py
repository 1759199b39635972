"""A request's body while it arrives: from the socket straight into the memory that is then written.

A body that is put together from parts is copied three times on its way; for half a megabyte that
takes longer than all that is done with it. So the transport is given memory to receive into, taken
in steps: a head, which costs a stranger nothing, claims none of it, and what is taken is never more
than `_AHEAD` times what has arrived. Not for: limits of a body's length, which its head was held to.
"""

from __future__ import annotations

from io import BytesIO
from typing import Final

#: The first step, for the first byte: that of each connection there may be is half of the room.
_FIRST_BYTES: Final = 64 * 1024
#: How much longer each step is than what has arrived: half a megabyte is whole after two.
_AHEAD: Final = 16
_NOTHING: Final = memoryview(b"")
#: Where bytes go that nobody reads; shared by all, because nobody does.
_DISCARDED: Final = memoryview(bytearray(_FIRST_BYTES))


class ArrivingBody:
    """The bytes of one body so far. Belongs to the loop thread."""

    __slots__ = ("_free", "_landing", "_start", "arrived_bytes", "is_dropped", "taken_bytes")

    def __init__(self) -> None:
        self.arrived_bytes = 0
        #: Memory that was taken for this body.
        self.taken_bytes = 0
        self.is_dropped = False
        #: All of it, as long as there is no landing.
        self._start = b""
        self._landing: BytesIO | None = None
        #: What of the landing is not filled yet.
        self._free = _NOTHING

    def add(self, part: bytes) -> None:
        """Keep a part that was received elsewhere."""
        if not self.is_dropped:
            self._start = self.take() + part if self.arrived_bytes else part
            self._landing, self._free = None, _NOTHING
            self.taken_bytes = max(self.taken_bytes, len(self._start))
        self.arrived_bytes += len(part)

    def room(self, missing_bytes: int) -> memoryview:
        """Where the next bytes are to be received. Requires: `missing_bytes` above 0."""
        if self.is_dropped:
            return _DISCARDED[:missing_bytes]
        if not self._free:
            self._grow(self.arrived_bytes + missing_bytes)
        return self._free

    def fill(self, count: int) -> None:
        """So many bytes were received into `room`."""
        self.arrived_bytes += count
        self._free = self._free[count:]

    def take(self) -> bytes:
        """What has arrived; not copied when it is whole."""
        if self._landing is None:
            return self._start
        # A view that is left would make `getvalue` copy.
        self._free = _NOTHING
        return self._landing.getvalue()[: self.arrived_bytes]

    def drop(self) -> None:
        """Nobody wants it: give the memory back, and forget what still comes."""
        self.is_dropped = True
        self._start, self._landing, self._free = b"", None, _NOTHING

    def _grow(self, body_bytes: int) -> None:
        before = self.take()
        self.taken_bytes = min(body_bytes, max(_FIRST_BYTES, len(before) * _AHEAD))
        # Its only reference: `getbuffer` and `getvalue` then work on these very bytes.
        landing = BytesIO(bytes(self.taken_bytes))
        view = landing.getbuffer()
        view[: len(before)] = before
        self._start, self._landing, self._free = b"", landing, view[len(before) :]
