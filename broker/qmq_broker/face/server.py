"""The broker's process: open the store, listen, stop in an orderly way, and return the exit code.

The first SIGTERM or SIGINT stops the broker: no more messages are accepted, waiting pulls are
answered, accepted requests are committed and answered, and the store is closed with its clean mark.
A second one ends the process at once. `exit_codes.py` lists the exit codes.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import secrets
import signal
import socket
from dataclasses import asdict
from typing import Any, Final, cast

import msgspec
import uvicorn
import uvloop

from qmq_broker.errors import CorruptionError, NoRoomError, StoreError
from qmq_broker.face.app import App
from qmq_broker.face.authentication.tls import TlsError
from qmq_broker.face.authentication.token_file import TokenFileError
from qmq_broker.face.connection.listener import (
    BACKLOG,
    BrokerServer,
    Security,
    end_slow_connections,
    files_needed,
    fit_connections,
    raise_files_limit,
)
from qmq_broker.face.connection.protocol import bounded_connection
from qmq_broker.face.exit_codes import ExitCode
from qmq_broker.face.limits import FaceLimits
from qmq_broker.face.logs import Repeats, log_event, values
from qmq_broker.face.memory import FACE_BUDGETS, SERVICE_BUDGETS, fit_budgets, memory_bytes
from qmq_broker.options import ServeOptions
from qmq_broker.service.broker import Broker, BrokerSettings
from qmq_broker.service.delivery.snapshot import check_groups
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.serving import Serving
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.format_file import check_format
from qmq_broker.storage.store import Store
from qmq_broker.storage.upkeep.quarantine import quarantine_damage
from qmq_broker.storage.upkeep.quarantine_report import QuarantineReport
from qmq_client.clock import Clock
from qmq_client.wire.blocks import learn_block_size
from qmq_client.wire.message_id import instance_of

_LOG: Final = logging.getLogger("qmq_broker")
#: How often leases and redeliveries are checked; also the precision of their times.
_TICK_S: Final = 0.025
#: Pause after a pass that failed, for example on a full disk: failures must not flood the log.
_TICK_AFTER_FAILURE_S: Final = 1.0
#: A garbage collection begins after this many objects; an answer of a thousand messages makes
#: thousands.
_YOUNG_OBJECTS: Final = 20_000
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
#: Limits to log above debug level: those that deployments change or that clients reach first.
_LIMITS_LOGGED: Final = (
    "wire.record_bytes",
    "wire.frame_bytes",
    "service.groups_bytes",
    "face.connections",
    "store.retain_ms",
    "store.retain_bytes",
    "store.reserve_bytes",
)
_OTHER_ADDRESS: Final = "Choose another address with --listen HOST:PORT."
#: What to do about an address that cannot be bound, by the system's error number.
_ADDRESS_REMEDIES: Final = {
    errno.EADDRINUSE: "Stop what listens there, or choose another address with --listen HOST:PORT.",
    errno.EACCES: "Choose a port from 1024 on with --listen HOST:PORT; lower ones need a privilege.",
    errno.EADDRNOTAVAIL: "Give an address of this machine with --listen HOST:PORT.",
}


def serve(
    options: ServeOptions,
    clock: Clock,
    *,
    limits: ServiceLimits | None = None,
    face_limits: FaceLimits | None = None,
    disk: Disk | None = None,
) -> ExitCode:
    """Serve until stopped. Blocks; must run in the main thread.

    Limits that are not given get their defaults, reduced to fit the memory of the process. `disk`
    replaces the machine's files in the data directory.
    """
    if limits is None or face_limits is None:
        fitting, face_fitting = _fit_memory()
        limits, face_limits = limits or fitting, face_limits or face_fitting
    bounds = _fit_files(face_limits, options)
    if bounds is None:
        return ExitCode.USAGE
    try:
        security = Security.of(options, clock)
    except (TokenFileError, TlsError) as error:
        log_event(_LOG, logging.CRITICAL, "not_started", code=error.code, reason=error)
        return ExitCode.USAGE
    listener = _bind(options)
    if listener is None:
        return ExitCode.ADDRESS
    with listener:
        try:
            there = disk or OsDisk(options.directory)
            if options.is_quarantining:
                check_format(there, options.store)  # before any data is deleted
                for report in quarantine_damage(there, clock, check_groups=check_groups):
                    _log_quarantined(report)
            store = Store.open(there, clock, options.store, check_groups=check_groups)
        except StoreError as error:
            return _not_opened(error)
        settings = BrokerSettings(
            wire=options.limits,
            limits=limits,
            store=options.store,
            is_read_only=options.is_read_only,
        )
        process = _Process(options, store, clock, settings, bounds, security)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(process.run(listener))


def _log_quarantined(report: QuarantineReport) -> None:
    lost = [
        f"{run.subject} {run.first_sequence} to {run.first_sequence + run.count - 1}"
        for run in report.lost
    ]
    if report.delayed:
        lost.append(f"{report.delayed} delayed messages")
    if report.may_hold_delayed:
        lost.append("perhaps delayed messages, in unknown number")
    fields = msgspec.to_builtins(report) | {"lost": ", ".join(lost) or "nothing"}
    log_event(_LOG, logging.ERROR, "quarantined", **fields)


class _Process:
    """One run of the broker."""

    def __init__(
        self,
        options: ServeOptions,
        store: Store,
        clock: Clock,
        settings: BrokerSettings,
        face_limits: FaceLimits,
        security: Security,
    ) -> None:
        self._options = options
        self._store = store
        self._clock = clock
        self._settings = settings
        self._face_limits = face_limits
        self._security = security
        self._signals = 0
        self._repeats = Repeats()

    async def run(self, listener: socket.socket) -> ExitCode:
        """Serve the opened store until it is closed again; returns the exit code."""
        loop = asyncio.get_running_loop()
        broker = Broker(self._store, self._clock, self._settings, post=loop.call_soon_threadsafe)
        face = App(
            broker,
            self._face_limits,
            instance=instance_of(secrets.randbits(64)),
            authenticator=self._security.authenticator,
        )
        server = self._make_server(face)
        broker.on_end = lambda: self._on_poisoned(broker, server)
        broker.on_stop = lambda: self._on_stop(broker, server)
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number, broker, server)
        loop.add_signal_handler(signal.SIGHUP, self._on_hang_up)
        try:
            replayed = broker.start()
        except StoreError as error:
            # The store is not closed: a close would mark it as clean, although it could not be read
            return _not_opened(error)
        log_event(
            _LOG,
            logging.INFO,
            "opened",
            directory=self._options.directory,
            epoch=self._store.epoch,
            actions=replayed,
            details=values("recovery", self._store.recovery),
        )
        _settle_memory()
        ticking = asyncio.ensure_future(self._tick(broker, server, face))
        await server.serve(sockets=[listener])
        ticking.cancel()
        return await self._stop(broker)

    def _make_server(self, face: App) -> BrokerServer:
        limits = self._face_limits
        config = uvicorn.Config(
            cast("Any", face),  # not called by uvicorn, but by the connections
            http=cast("type[asyncio.Protocol]", bounded_connection(face, limits)),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=max(1, self._options.drain_ms // 1000),
        )
        return BrokerServer(
            config,
            self._on_listening,
            self._security.tls,
            limits,
        )

    def _on_listening(self, sockets: list[socket.socket]) -> None:
        host, port = sockets[0].getsockname()[:2]
        scheme = "http" if self._security.tls is None else "https"
        log_event(_LOG, logging.INFO, "limits", details=self._limits())
        # The last line of a start: short, for people who wait for it at a terminal.
        log_event(
            _LOG,
            logging.INFO,
            "listening",
            url=f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}",
            pid=os.getpid(),
            tokens=self._security.tokens_count(),
        )

    def _limits(self) -> dict[str, object]:
        """Limits to log: all at debug level, else a few."""
        limits = {
            **values("wire", self._settings.wire),
            **values("service", self._settings.limits),
            **values("face", self._face_limits),
            **values("store", self._settings.store),
        }
        if _LOG.isEnabledFor(logging.DEBUG):
            return limits
        return {name: limits[name] for name in _LIMITS_LOGGED}

    async def _tick(self, broker: Broker, server: BrokerServer, face: App) -> None:
        """Run all time-dependent work."""
        loop = asyncio.get_running_loop()
        next_sweep_s = loop.time()
        while True:
            pause_s = _TICK_S
            try:
                broker.step()
                if loop.time() >= next_sweep_s:
                    next_sweep_s = loop.time() + self._face_limits.sweep_ms / 1000
                    self._sweep(server, face, loop.time())
                    _log_dead(broker, loop.time())
            except Exception as error:  # the top of this loop
                times = self._repeats.due(f"tick_failed {type(error).__name__}", loop.time())
                if times:
                    log_event(_LOG, logging.ERROR, "tick_failed", error=error, times=times)
                pause_s = _TICK_AFTER_FAILURE_S
            await asyncio.sleep(pause_s)

    def _sweep(self, server: BrokerServer, face: App, now_s: float) -> None:
        counts = end_slow_connections(server.server_state.connections, now_s, self._face_limits)
        closed = {"slow": counts.slow, "unread": counts.unread + face.take_dropped()}
        for reason, count in closed.items():
            connections = self._repeats.due(reason, now_s, count)
            if connections:
                log_event(
                    _LOG,
                    logging.INFO,
                    "slow_connections_closed",
                    reason=reason,
                    connections=connections,
                )
        requests = self._repeats.due("unauthenticated_requests", now_s, self._security.step())
        if requests:
            log_event(_LOG, logging.WARNING, "unauthenticated_requests", requests=requests)

    def _on_signal(self, number: int, broker: Broker, server: BrokerServer) -> None:
        self._signals += 1
        name = signal.Signals(number).name
        if self._signals > 1:
            log_event(_LOG, logging.WARNING, "forced", signal=name)
            logging.shutdown()
            os._exit(ExitCode.UNCLEAN)
        woken = broker.ask_to_stop(f"{name} received")
        log_event(_LOG, logging.INFO, "stopping", signal=name, waiting_pulls=woken)

    def _on_hang_up(self) -> None:
        log_event(_LOG, logging.INFO, "reloading", signal="SIGHUP")
        self._security.reload()

    def _on_stop(self, broker: Broker, server: BrokerServer) -> None:
        log_event(_LOG, logging.INFO, "draining", reason=broker.serving.reason)
        server.should_exit = True

    def _on_poisoned(self, broker: Broker, server: BrokerServer) -> None:
        log_event(_LOG, logging.CRITICAL, "poisoned", reason=broker.serving.reason)
        server.should_exit = True

    async def _stop(self, broker: Broker) -> ExitCode:
        loop = asyncio.get_running_loop()
        deadline_s = self._options.drain_ms / 1000
        try:
            is_clean = await loop.run_in_executor(None, broker.stop, deadline_s)
        except NoRoomError as error:
            # Everything accepted is on the disk; there was no room to record that the stop was
            # orderly.
            log_event(_LOG, logging.WARNING, "stop_not_marked", code=error.code, reason=error)
            is_clean = False
        except StoreError as error:
            log_event(_LOG, logging.CRITICAL, "not_closed", error=error)
            is_clean = False
        log_event(_LOG, logging.INFO, "stopped", clean=is_clean)
        if broker.serving.state is Serving.POISONED:
            return ExitCode.POISONED
        return ExitCode.OK if is_clean else ExitCode.UNCLEAN


def _log_dead(broker: Broker, now_s: float) -> None:
    for dead in broker.delivery.journal.dead_letter_digest.take(now_s):
        log_event(_LOG, logging.WARNING, "dead_letters", details=asdict(dead))


def _settle_memory() -> None:
    """Tune garbage collection; called once all objects exist that live as long as the process."""
    learn_block_size()
    # Later garbage collections then skip modules, routes and queues.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])


def _not_opened(error: StoreError) -> ExitCode:
    # The texts of other store errors contain the remedy.
    more = {"remedy": error.remedy} if isinstance(error, CorruptionError) else {}
    log_event(_LOG, logging.CRITICAL, "not_opened", code=error.code, reason=error, details=more)
    return ExitCode.CORRUPTION if more else ExitCode.DIRECTORY


def _fit_files(limits: FaceLimits, options: ServeOptions) -> FaceLimits | None:
    """The limits reduced to the files that this process may open; None if these are too few."""
    files = raise_files_limit()
    fitting = fit_connections(limits, files=files, queue_files=options.store.open_files)
    if fitting is None:
        log_event(
            _LOG,
            logging.CRITICAL,
            "too_few_files",
            files=files,
            needed=files_needed(options.store.open_files),
            remedy="Raise the limit of open files of this process (ulimit -n).",
        )
    elif fitting.connections < limits.connections:
        log_event(
            _LOG,
            logging.WARNING,
            "fewer_connections",
            files=files,
            connections=fitting.connections,
            remedy="Raise the limit of open files of this process (ulimit -n).",
        )
    return fitting


def _fit_memory() -> tuple[ServiceLimits, FaceLimits]:
    """The default limits, reduced to fit the memory of this process."""
    memory = memory_bytes()
    service, face = fit_budgets(ServiceLimits(), FaceLimits(), memory)
    if service != ServiceLimits():
        log_event(
            _LOG,
            logging.INFO,
            "smaller_budgets",
            memory_bytes=memory,
            **{name: getattr(service, name) for name in SERVICE_BUDGETS},
            **{name: getattr(face, name) for name in FACE_BUDGETS},
        )
    return service, face


def _bind(options: ServeOptions) -> socket.socket | None:
    """A bound socket; None if the address cannot be bound, which is logged with the remedy."""
    address = f"{options.host}:{options.port}"
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        log_event(
            _LOG,
            logging.CRITICAL,
            "address_not_available",
            address=address,
            reason=error.strerror or error,
            remedy=_ADDRESS_REMEDIES.get(error.errno or 0, _OTHER_ADDRESS),
        )
        return None
    return listener
