"""The receive buffer of one request's body: the memory that the socket writes into and the disk reads from.

A body joined from parts would be copied three times; for half a megabyte that takes longer than
processing it. So the transport gets memory to receive into, allocated in steps. A head alone, which
costs a client nothing, allocates none, and the allocated memory is never more than `_AHEAD` times
the received bytes. Not for: limits on the length of a body.
"""

from __future__ import annotations

from io import BytesIO
from typing import Final

#: The first step, for the first byte: with all possible connections together, half of the memory for bodies.
_FIRST_BYTES: Final = 64 * 1024
#: Ratio of each step to the received bytes: half a megabyte is complete after two steps.
_AHEAD: Final = 16
_NOTHING: Final = memoryview(b"")
#: Memory for discarded bytes; shared by all buffers.
_DISCARDED: Final = memoryview(bytearray(_FIRST_BYTES))


class ReceiveBuffer:
    """The bytes of one body so far. Belongs to the loop thread."""

    __slots__ = ("_buffer", "_free", "_start", "arrived_bytes", "is_dropped", "taken_bytes")

    def __init__(self) -> None:
        self.arrived_bytes = 0
        #: Memory allocated for this body.
        self.taken_bytes = 0
        self.is_dropped = False
        #: The whole content while there is no buffer.
        self._start = b""
        self._buffer: BytesIO | None = None
        #: The part of the buffer that is not filled yet.
        self._free = _NOTHING

    def add(self, part: bytes) -> None:
        """Add a part that was received in other memory."""
        if not self.arrived_bytes and not self.is_dropped:
            self._start, self.arrived_bytes, self.taken_bytes = part, len(part), len(part)
            return
        left = memoryview(part)
        while left:  # the length of the body is unknown before its end
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
        """The received bytes; not copied if the body is complete."""
        if self._buffer is None:
            return self._start
        # A remaining view would make `getvalue` copy.
        self._free = _NOTHING
        return self._buffer.getvalue()[: self.arrived_bytes]

    def drop(self) -> None:
        """Free the memory, and discard further bytes."""
        self.is_dropped = True
        self._start, self._buffer, self._free = b"", None, _NOTHING

    def _grow(self, body_bytes: int) -> None:
        before = self.take()
        self.taken_bytes = min(body_bytes, max(_FIRST_BYTES, len(before) * _AHEAD))
        # The only reference to the bytes, so that `getbuffer` and `getvalue` use the same memory.
        buffer = BytesIO(bytes(self.taken_bytes))
        view = buffer.getbuffer()
        view[: len(before)] = before
        self._start, self._buffer, self._free = b"", buffer, view[len(before) :]
