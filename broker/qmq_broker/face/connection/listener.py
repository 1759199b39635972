"""The listening socket of the broker: uvicorn with authentication, TLS, and a limit on connections.

A connection costs a descriptor, and each process has a limited number of them. No client may fill that
limit with idle connections and keep the broker from its own files. Not for: the limit of the whole
machine, which cannot be reserved; reaching it refuses requests (`FilesFullError`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Self, cast

import uvicorn

from qmq_broker.face.authentication.authenticator import Authenticator
from qmq_broker.face.authentication.tls import TlsContext
from qmq_broker.face.authentication.token_file import WatchedTokens
from qmq_broker.face.connection.protocol import Connection
from qmq_broker.face.limits import FaceLimits
from qmq_broker.face.logs import Repeats, log_event
from qmq_broker.options import ServeOptions
from qmq_client.clock import Clock

_LOG: Final = logging.getLogger(__name__)
#: How long a peer may take to close TLS; all its data was transferred by then.
_TLS_GOODBYE_S: Final = 2.0
#: How long to wait before the next accept after one failed, as for want of descriptors.
_AFTER_FAILURE_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Authentication and TLS: the tokens and the certificate, reloaded when their files change."""

    authenticator: Authenticator
    tokens: WatchedTokens | None
    tls: TlsContext | None

    @classmethod
    def of(cls, options: ServeOptions, clock: Clock) -> Self:
        """Read tokens and certificate; raises `TokenFileError` or `TlsError`."""
        tokens = WatchedTokens(options.tokens_file) if options.tokens_file else None
        tls = TlsContext(options.tls, clock.now_ms) if options.tls is not None else None
        return cls(authenticator=Authenticator(tokens, clock.now_ms), tokens=tokens, tls=tls)

    def reload(self) -> None:
        """Make the next step read tokens and certificate, even if unchanged."""
        for file in (self.tokens, self.tls):
            if file is not None:
                file.forget()

    def step(self) -> int:
        """Check the files; returns how many requests were refused since the last step."""
        if self.tls is not None:
            self.tls.step()
        return self.authenticator.step()

    def tokens_count(self) -> int | str:
        """For the log: the number of tokens, or that there is no token file."""
        return "none needed" if self.tokens is None else len(self.tokens.current.entries)


class BrokerServer(uvicorn.Server):
    """uvicorn without its own signal handling, which would end the process by the signal, and with
    bounds on TLS handshakes.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        on_listening: Callable[[list[socket.socket]], None],
        tls: TlsContext | None,
        limits: FaceLimits,
    ) -> None:
        super().__init__(config)
        self._on_listening = on_listening
        self._tls = tls
        self._limits = limits

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
        """Like uvicorn's method, but with a limit on the time and number of handshakes."""
        await self.lifespan.startup()
        loop = asyncio.get_running_loop()
        self.servers = []
        for listener in sockets:
            listener.listen(self.config.backlog)
            listener.setblocking(False)
            accepting = _TlsListener(
                lambda sock: loop.connect_accepted_socket(
                    self._protocol,
                    sock,
                    ssl=tls.context,
                    ssl_handshake_timeout=self._limits.head_ms / 1000,
                    ssl_shutdown_timeout=_TLS_GOODBYE_S,
                ),
                self.server_state.connections,
                self._limits,
            )
            accepting.start(listener)
            self.servers.append(cast("asyncio.Server", accepting))
        self.started = True

    def _protocol(self) -> asyncio.Protocol:
        make = cast("Callable[..., asyncio.Protocol]", self.config.http_protocol_class)
        return make(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )


class _TlsListener:
    """Accepts connections and does their TLS handshakes, some at a time, in place of the loop's own
    server.

    Handshakes count as connections: a client that starts many handshakes and finishes none reaches
    the limit of connections.
    """

    def __init__(
        self,
        shake: Callable[[socket.socket], Awaitable[object]],
        connections: Collection[object],
        limits: FaceLimits,
    ) -> None:
        self._shake = shake
        self._connections = connections
        self._limits = limits
        self._shaking: Counter[str] = Counter()
        self._tasks: set[asyncio.Future[None]] = set()
        self._repeats = Repeats()

    def start(self, listener: socket.socket) -> None:
        """Start accepting connections."""
        self._add(self._accept(listener))

    def close(self) -> None:
        """Accept no more, and end the handshakes under way."""
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until everything that `close` stops has stopped."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _add(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:  # no more descriptors, or the client left before the accept
                times = self._repeats.due("not_accepted", loop.time())
                if times:
                    log_event(_LOG, logging.WARNING, "not_accepted", reason=error, times=times)
                await asyncio.sleep(_AFTER_FAILURE_S)
                continue
            if self._is_full(address[0]):
                connection.close()
                continue
            self._add(self._take(connection, address[0]))

    def _is_full(self, address: str) -> bool:
        count = len(self._connections) + self._shaking.total()
        return (
            count >= self._limits.connections
            or self._shaking[address] >= self._limits.connections_per_address
        )

    def _log_failed(self, address: str, error: OSError) -> None:
        """Log why, once for each kind of failure and then at doubling intervals: a port may be scanned."""
        kind = getattr(error, "reason", None) or type(error).__name__
        times = self._repeats.due(("handshake_failed", kind), asyncio.get_running_loop().time())
        if times:
            log_event(
                _LOG,
                logging.WARNING,
                "handshake_failed",
                address=address,
                kind=kind,
                reason=error,
                times=times,
            )

    async def _take(self, connection: socket.socket, address: str) -> None:
        self._shaking[address] += 1
        try:
            await self._shake(connection)
        except OSError as error:  # TLS errors and timeouts are subclasses of it
            connection.close()
            self._log_failed(address, error)
        finally:
            self._shaking[address] -= 1
            if not self._shaking[address]:
                del self._shaking[address]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCounts:
    """Counts of one pass over the connections."""

    #: Connections that sent too slowly.
    slow: int
    #: Connections whose client does not read.
    unread: int


def end_slow_connections(
    connections: Iterable[object], now_s: float, limits: FaceLimits
) -> SweepCounts:
    """One pass over all connections: end those too slow at sending or reading in this pass and the
    last.

    Idle connections are closed too, after a while.
    """
    slow = unread = 0
    for connection in list(connections):
        if not isinstance(connection, Connection):
            continue
        is_closing = connection.transport.is_closing()
        if is_closing and connection.unread_since_s is None:
            connection.unread_since_s = (
                now_s  # it stays open until the client has read the rest of its answer
            )
        allowed_ms = limits.head_ms if connection.is_in_head else limits.request_ms
        is_held_up = is_closing or connection.flow.read_paused
        is_slow = not is_held_up and _is_over(connection.receiving_since_s, now_s, allowed_ms)
        is_unread = _is_over(connection.unread_since_s, now_s, limits.unread_ms)
        is_idle = not is_closing and _is_over(connection.idle_since_s, now_s, limits.idle_ms)
        was_slow, connection.was_slow = connection.was_slow, is_slow or is_unread or is_idle
        if was_slow and is_slow:
            connection.end_slow()
            slow += 1
        elif was_slow and is_unread:
            connection.transport.abort()
            unread += 1
        elif was_slow and is_idle:
            connection.transport.close()
    return SweepCounts(slow=slow, unread=unread)


def _is_over(since_s: float | None, now_s: float, allowed_ms: int) -> bool:
    return since_s is not None and (now_s - since_s) * 1000 > allowed_ms


#: Connections that wait to be accepted: this many may briefly be open beyond the limit.
BACKLOG: Final = 128
#: Segments, checkpoints, the lock, logs and the event loop's own: about 20, and two more for each GiB.
_OTHER_FILES: Final = 128
#: A broker with fewer connections is useless.
_CONNECTIONS_MIN: Final = 16


def raise_files_limit() -> int:
    """Raise the limit of open files as far as this process may; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):
        # Some systems name a hard limit that they do not grant.
        return soft
    return hard


def fit_connections(limits: FaceLimits, *, files: int, queue_files: int) -> FaceLimits | None:
    """The same bounds with as many connections as fit into `files`; None if hardly any do."""
    if files == resource.RLIM_INFINITY:
        return limits
    room = files - queue_files - _OTHER_FILES - BACKLOG
    if room >= limits.connections:
        return limits
    if room < _CONNECTIONS_MIN:
        return None
    share = limits.connections_per_address / limits.connections
    per_address = max(1, min(limits.connections_per_address, int(room * share)))
    return replace(limits, connections=room, connections_per_address=per_address)


def files_needed(queue_files: int) -> int:
    """The fewest descriptors with which a broker starts."""
    return queue_files + _OTHER_FILES + BACKLOG + _CONNECTIONS_MIN
