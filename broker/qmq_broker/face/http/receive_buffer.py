"""The receive buffer of one request's body: the memory that the socket writes into and the disk reads from.

A body joined from parts is copied three times on its way; for half a megabyte that takes longer than all that
is done with it. So the transport gets memory to receive into, allocated in steps. A head, which costs a client
nothing, claims none of it, and what is allocated is never more than `_AHEAD` times what has arrived. Not for:
limits on the length of a body.
"""

from __future__ import annotations

from io import BytesIO
from typing import Final

#: The first step, for the first byte: for all possible connections together, half of the room.
_FIRST_BYTES: Final = 64 * 1024
#: How much longer each step is than what has arrived: half a megabyte is complete after two.
_AHEAD: Final = 16
_NOTHING: Final = memoryview(b"")
#: Where discarded bytes go; shared by all.
_DISCARDED: Final = memoryview(bytearray(_FIRST_BYTES))


class ReceiveBuffer:
    """The bytes of one body so far. Belongs to the loop thread."""

    __slots__ = ("_buffer", "_free", "_start", "arrived_bytes", "is_dropped", "taken_bytes")

    def __init__(self) -> None:
        self.arrived_bytes = 0
        #: Memory allocated for this body.
        self.taken_bytes = 0
        self.is_dropped = False
        #: The whole content, as long as there is no buffer.
        self._start = b""
        self._buffer: BytesIO | None = None
        #: The part of the buffer that is not filled yet.
        self._free = _NOTHING

    def add(self, part: bytes) -> None:
        """Add a part that was received elsewhere."""
        if not self.arrived_bytes and not self.is_dropped:
            self._start, self.arrived_bytes, self.taken_bytes = part, len(part), len(part)
            return
        left = memoryview(part)
        while left:  # of a length that is not known before the end
            room = self.room(max(len(left), self.arrived_bytes // 4))
            count = min(len(room), len(left))
            room[:count] = left[:count]
            self.fill(count)
            left = left[count:]

    def room(self, missing_bytes: int) -> memoryview:
        """Where to receive the next bytes. Requires: `missing_bytes` above 0."""
        if self.is_dropped:
            return _DISCARDED[:missing_bytes]
        if not self._free:
            self._grow(self.arrived_bytes + missing_bytes)
        return self._free

    def fill(self, count: int) -> None:
        """This many bytes were received into `room`."""
        self.arrived_bytes += count
        self._free = self._free[count:]

    def take(self) -> bytes:
        """What has arrived; not copied if it is complete."""
        if self._buffer is None:
            return self._start
        # A remaining view would make `getvalue` copy.
        self._free = _NOTHING
        return self._buffer.getvalue()[: self.arrived_bytes]

    def drop(self) -> None:
        """Free the memory, and discard bytes that still come."""
        self.is_dropped = True
        self._start, self._buffer, self._free = b"", None, _NOTHING

    def _grow(self, body_bytes: int) -> None:
        before = self.take()
        self.taken_bytes = min(body_bytes, max(_FIRST_BYTES, len(before) * _AHEAD))
        # The only reference to them: `getbuffer` and `getvalue` then work on these very bytes.
        buffer = BytesIO(bytes(self.taken_bytes))
        view = buffer.getbuffer()
        view[: len(before)] = before
        self._start, self._buffer, self._free = b"", buffer, view[len(before) :]
