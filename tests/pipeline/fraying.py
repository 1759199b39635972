"""A line to a broker that breaks again and again."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

from tests.faults.proxy import Proxy


class FrayingLine(Proxy):
    """Every connection ends after a random 20 to 200 KB of answers; the same ones for the same seed and order."""

    def __init__(self, target_port: int, *, seed: int) -> None:
        super().__init__(target_port)
        self._draw = random.Random(seed)
        #: Of answers, headers included, that came through.
        self.passed_bytes = 0
        #: Connections that ended in the middle of an answer, or between two.
        self.breaks = 0

    @property
    def url(self) -> str:
        """The broker, by this line."""
        return f"http://127.0.0.1:{self.port}"

    def _to_client(self, client: socket.socket, server: socket.socket, fate: list[str]) -> None:
        left = self._draw.randint(20_000, 200_000)
        try:
            while left and (data := server.recv(min(left, 65_536))):
                client.sendall(data)
                left -= len(data)
                self.passed_bytes += len(data)
            self.breaks += not left
        except OSError:
            pass  # one of the two has gone: so goes the other
        server.close()  # the broker hears at once that nobody wants the rest
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)  # the other thread may be listening to it
