"""The listening side of the process: who is let in, by which TLS, and uvicorn around both."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Self

import uvicorn

from qmq_broker.clock import Clock
from qmq_broker.face.door import Door
from qmq_broker.face.tls import TlsContext
from qmq_broker.face.token_file import WatchedTokens
from qmq_broker.options import ServeOptions

#: How long a peer may take to say goodbye; the connection is done by then.
_TLS_GOODBYE_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """What stands between the network and the routes."""

    door: Door
    tokens: WatchedTokens | None
    tls: TlsContext | None

    @classmethod
    def of(cls, options: ServeOptions, clock: Clock) -> Self:
        """Read tokens and certificate; raises `TokenFileError` or `TlsError`."""
        tokens = WatchedTokens(options.tokens_file) if options.tokens_file else None
        tls = TlsContext(options.tls) if options.tls is not None else None
        return cls(door=Door(tokens, clock.now_ms), tokens=tokens, tls=tls)

    def step(self) -> int:
        """Look at the files; how many requests were turned away since the last step."""
        if self.tls is not None:
            self.tls.step()
        return self.door.step()

    def tokens_count(self) -> int | str:
        """For the log: how many there are, or that there is no such file."""
        return "none needed" if self.tokens is None else len(self.tokens.current.entries)


class BrokerServer(uvicorn.Server):
    """uvicorn without its own signal handling, which would end the process by the signal, and with
    a deadline on TLS handshakes."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_listening: Callable[[list[socket.socket]], None],
        tls: TlsContext | None,
        *,
        handshake_s: float,
    ) -> None:
        super().__init__(config)
        self._on_listening = on_listening
        self._tls = tls
        self._handshake_s = handshake_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is None:
            await super().startup(sockets)
        else:
            await self._start_tls(self._tls, sockets or [])
        self._on_listening(sockets or [])

    async def _start_tls(self, tls: TlsContext, sockets: list[socket.socket]) -> None:
        """As uvicorn does it, whose handshakes may take a minute each."""
        await self.lifespan.startup()
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                self._protocol,
                sock=listener,
                ssl=tls.context,
                backlog=self.config.backlog,
                ssl_handshake_timeout=self._handshake_s,
                ssl_shutdown_timeout=_TLS_GOODBYE_S,
            )
            for listener in sockets
        ]
        self.started = True

    def _protocol(self) -> asyncio.Protocol:
        assert not isinstance(self.config.http_protocol_class, str)
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
