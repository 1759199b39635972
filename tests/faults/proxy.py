"""A TCP forwarder in front of a database or a broker: cuts the line, holds back one direction of it,
or loses the answer to a COMMIT.

What is held back arrives after `heal`, however late and whoever still listens, as what TCP sends again
does. A connection that is made meanwhile is taken by the forwarder, which the other side never hears of.
"""

from __future__ import annotations

import socket
import struct
import threading
from typing import Final, Literal, Self

from tests.kit.waiting import DEADLINE_S

_CHUNK_BYTES: Final = 65_536
_COMMIT: Final = b"COMMIT"
#: On a slow line a piece of this length passes, and then nothing for so long.
_SLOW_BYTES: Final = 400
_SLOW_S: Final = 0.004
#: Close with RST instead of FIN.
_RESET: Final = struct.pack("ii", 1, 0)

Way = Literal["requests", "answers"]


class Proxy:
    """Forwards every connection to one port of this machine; `with` ends it.

    `arm("reset")`: the next COMMIT is executed, and its client finds the connection reset.
    `arm("swallow")`: it is executed, and its client waits for an answer that never comes, until
    `release` or the end of the block resets the connection.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._next: str | None = None
        self._is_cut = False
        #: Whether everything passes in small pieces, with a wait behind each.
        self.is_slow = False
        self._sockets: list[socket.socket] = []
        self._swallowed: list[socket.socket] = []
        self._passing: dict[Way, threading.Event] = {
            "requests": threading.Event(),
            "answers": threading.Event(),
        }
        #: How many pieces still pass before the line is cut; None: all.
        self._left: dict[Way, int | None] = {"requests": None, "answers": None}
        #: The server has answered a COMMIT whose answer nobody gets.
        self.struck = threading.Event()
        #: Somebody said something that is held back, or that cut the line.
        self.held = threading.Event()
        #: How many connections have something held back.
        self.held_count = 0
        self.heal()

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        # A socket that is only closed lives on for the thread that waits in a call of it.
        _shut(self._listener)
        self._listener.close()
        self._accepting.join(DEADLINE_S)
        for each in self._sockets:
            _shut(each)
            each.close()
        self.heal()

    def arm(self, what: str) -> None:
        """Strike the next COMMIT."""
        self.struck.clear()
        self._next = what

    def release(self) -> None:
        """Reset the connections whose answers were swallowed."""
        for client in self._swallowed:
            _reset(client)
        self._swallowed.clear()

    def cut(self) -> None:
        """Reset every connection, now and from now on."""
        self._is_cut = True
        # Taken first: whoever hears of the first reset may heal the line and connect anew meanwhile.
        doomed, self._sockets = self._sockets, []
        for each in doomed:
            _reset(each)

    def cut_at(self, way: Way, count: int) -> None:
        """Cut the line instead of forwarding the piece of this number, from 0, that goes this way."""
        self.held.clear()
        self._left[way] = count

    def hold(self, way: Way) -> None:
        """Let nothing pass this way any more; the other way stays open."""
        self.held.clear()
        self.held_count = 0
        self._passing[way].clear()

    def heal(self) -> None:
        """New connections are forwarded again, and what was held back goes on."""
        self._is_cut = False
        for way, passing in self._passing.items():
            self._left[way] = None
            passing.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut:
                _reset(client)
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                _reset(client)
                continue
            self._sockets.extend((client, server))
            fate: list[str] = []
            for pump in (self._to_server, self._to_client):
                threading.Thread(target=pump, args=(client, server, fate), daemon=True).start()

    def _to_server(self, client: socket.socket, server: socket.socket, fate: list[str]) -> None:
        while data := _receive(client):
            if self._next is not None and _COMMIT in data:
                fate.append(self._next)
                self._next = None
            if not self._passes("requests"):
                return
            self._forward(server, data)
        self._passing["requests"].wait()  # the end of a connection is news like any other
        _shut(server)

    def _to_client(self, client: socket.socket, server: socket.socket, fate: list[str]) -> None:
        while data := _receive(server):
            if not fate:
                if not self._passes("answers"):
                    return
                self._forward(client, data)
                continue
            if fate[0] == "reset":
                _reset(client)
            else:
                self._swallowed.append(client)
            self.struck.set()
            while _receive(server):
                pass
        if not fate:
            self._passing["answers"].wait()
            _shut(client)

    def _forward(self, connection: socket.socket, data: bytes) -> None:
        if not self.is_slow:
            _send(connection, data)
            return
        for first in range(0, len(data), _SLOW_BYTES):
            _send(connection, data[first : first + _SLOW_BYTES])
            threading.Event().wait(_SLOW_S)

    def _passes(self, way: Way) -> bool:
        """Whether the next piece goes on, perhaps after a wait; if not, the line is cut here."""
        if not self._passing[way].is_set():
            self.held_count += 1
            self.held.set()
            self._passing[way].wait()
        left = self._left[way]
        if left is None:
            return True
        self._left[way] = left - 1
        if left > 0:
            return True
        self._left[way] = None
        self.held.set()  # before the client can hear of it
        self.cut()
        return False


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(_CHUNK_BYTES)
    except OSError:
        return b""


def _send(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
    except OSError:
        return


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def _reset(connection: socket.socket) -> None:
    if connection.fileno() < 0:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    # Another thread may be reading from it; only a shutdown wakes that one up.
    _shut(connection)
    connection.close()
