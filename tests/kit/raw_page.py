"""A page of a snapshot that is made of any bytes."""

from __future__ import annotations


class RawPage(bytes):
    """Says its own bytes when it is read."""

    def read(self) -> bytes:
        return bytes(self)
