"""`/metrics` and `/healthz` of the daemon, for machines on an internal network.

A few requests at a time, a few seconds for each, only GET, no body is read. `/healthz` answers 503
only if the daemon itself does not work: unreachable databases and brokers are reported in the body
and in the metrics, because restarting this process would repair neither.

Metrics are made on request (`collector.py`); a scrape queries no database.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Final

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.errors import ConfigurationError
from qmq_watchdog.daemon import Daemon
from qmq_watchdog.databases import ConnectionBudget
from qmq_watchdog.sweep_job import sweep_jobs

#: From the connection to the end of the answer, however slowly the client writes or reads.
_REQUEST_S_MAX: Final = 5.0
#: Simultaneous connections; any more are closed unanswered.
_CONNECTIONS_MAX: Final = 16
#: Longest wait of a stop for the server to notice it.
_STOP_LOOK_S: Final = 0.1
#: A daemon whose main loop has not run for this long is unhealthy.
BEAT_S_MAX: Final = 15.0
_SHOWN_MAX: Final = 20
_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


class Health:
    """The answer of `/healthz`. `beat` is called by the main loop."""

    def __init__(self, daemon: Daemon, clock: Clock = SYSTEM_CLOCK) -> None:
        self._daemon = daemon
        self._clock = clock
        self._beat_s = clock.monotonic_s()

    def beat(self) -> None:
        """Record that the main loop is running."""
        self._beat_s = self._clock.monotonic_s()

    def look(self) -> tuple[bool, dict[str, Any]]:
        """Whether the daemon is healthy, and the report."""
        now_s = self._clock.monotonic_s()
        is_well = now_s - self._beat_s <= BEAT_S_MAX
        jobs = self._daemon.jobs()
        sweeps = sweep_jobs(jobs)
        ages = {job.name: job.totals.oldest_unsent_s(now_s) for job in sweeps}
        oldest = max(ages, key=lambda name: ages[name], default="")
        in_trouble = [job for job in jobs.values() if job.is_in_trouble]
        return is_well, {
            "status": "ok" if is_well else "stalled",
            "databases": len(sweeps),
            "oldest_unsent_age_s": round(ages.get(oldest, 0.0), 3),
            "oldest_unsent_in": oldest if ages.get(oldest) else None,
            "in_trouble": len(in_trouble),
            "troubles": {job.name: job.trouble for job in in_trouble[:_SHOWN_MAX]},
        }


class Endpoint:
    """Answers on its own address from its own thread."""

    def __init__(
        self, listen: str, daemon: Daemon, health: Health, budget: ConnectionBudget | None = None
    ) -> None:
        scrape = _scraper(daemon, budget)
        bound = {"scrape": staticmethod(scrape), "health": health}
        handler = type("_BoundHandler", (_Handler,), bound)
        host, _, port = listen.rpartition(":")
        try:
            self._server = _Server(host.strip("[]"), int(port), handler)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                setting="watchdog.metrics_listen",
                value=f"{listen}: {error}",
                remedy="Give a free address of this machine, like 127.0.0.1:9471.",
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_STOP_LOOK_S,),
            name="qmq-watchdog-metrics",
            daemon=True,
        )

    @property
    def address(self) -> str:
        """Where it listens, with the actual port if 0 was asked for."""
        host, port = self._server.socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def start(self) -> None:
        """Start answering."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_REQUEST_S_MAX)


class _Server(ThreadingHTTPServer):
    """A server with a thread for each connection; the number and duration of connections are limited."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, handler: Any) -> None:
        self._room = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be created, so release the place here
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        ending = threading.Timer(_REQUEST_S_MAX, _end, (request,))
        ending.daemon = True
        try:
            ending.start()
            super().process_request_thread(request, client_address)
        except RuntimeError:  # no thread could be created to end it
            self.shutdown_request(request)
        finally:
            ending.cancel()
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing for a client that disconnected or was too slow."""


def _end(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


def _scraper(daemon: Daemon, budget: ConnectionBudget | None) -> Callable[[], bytes]:
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise ConfigurationError(
            setting="watchdog.metrics_listen",
            value="prometheus-client is not installed",
            remedy='Run pip install "qmq[metrics]".',
        ) from error
    from qmq_watchdog.collector import WatchdogCollector

    registry = CollectorRegistry()
    registry.register(WatchdogCollector(daemon, budget))
    return lambda: generate_latest(registry)


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_S_MAX
    server_version = "qmq"
    sys_version = ""
    health: ClassVar[Health]
    scrape: ClassVar[Callable[[], bytes]]

    def do_GET(self) -> None:  # the name that http.server requires
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, _TEXT, type(self).scrape())
        elif path == "/healthz":
            is_well, found = self.health.look()
            body = json.dumps(found).encode()
            self._answer(200 if is_well else 503, "application/json", body)
        else:
            self._answer(404, _TEXT, b"/metrics or /healthz\n")

    def log_message(self, format: str, *args: Any) -> None:  # as in the base class
        """Log nothing for a scrape."""

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
