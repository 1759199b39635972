"""The service `qmq watchdog run`: connects the parts and runs the main loop.

All databases share one transport, one broker gate and one connection budget. The databases come
from the configuration and, if configured, from the registry.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from random import random
from typing import Final

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.errors import ConfigurationError
from qmq_client.settings.masking import mask_secrets
from qmq_client.settings.sections import Config, DatabaseSection
from qmq_client.signal_flag import SignalFlag
from qmq_client.transport.address import BrokerAddress
from qmq_client.transport.http import HttpTransport
from qmq_watchdog.daemon import Daemon
from qmq_watchdog.databases import (
    CONNECTIONS_PER_RUN,
    ConnectionBudget,
    open_database,
    open_registry,
)
from qmq_watchdog.endpoint import Endpoint, Health
from qmq_watchdog.events import log_event
from qmq_watchdog.fleet import Fleet, RegistryJob
from qmq_watchdog.options import DaemonOptions
from qmq_watchdog.outage import BrokerGate
from qmq_watchdog.sweep import Sweep, SweepOptions
from qmq_watchdog.sweep_job import SweepJob

#: How often the main loop checks the clock, slow sweeps and signals.
LOOK_S: Final = 0.5
_NAMES_SHOWN_MAX: Final = 20


class Service:
    """One watchdog process. `run` belongs to the main thread.

    Raises `ConfigurationError` for invalid settings, before it starts threads.
    """

    def __init__(
        self, config: Config, environment: Mapping[str, str], *, broker_from: str = ""
    ) -> None:
        """`broker_from`: the origin of the broker's address, for the log line at the start."""
        self._config = config
        self._broker_from = broker_from
        self._environment = environment
        limits = config.watchdog
        in_use_max = CONNECTIONS_PER_RUN * (limits.workers + limits.isolated_workers)
        kept_max = limits.connections_max - in_use_max
        if kept_max < 0:
            raise ConfigurationError(
                setting="watchdog.connections_max",
                value=f"{limits.connections_max}, fewer than {CONNECTIONS_PER_RUN} for each of "
                "workers and isolated_workers",
                remedy=f"Give at least {in_use_max}, or fewer workers.",
            )
        self._options = DaemonOptions.from_config(limits)
        self._transport = HttpTransport(BrokerAddress.of_section(config.broker))
        self._gate = BrokerGate(self._options.backoff, random, SYSTEM_CLOCK)
        self._budget = ConnectionBudget(kept_max)
        self.daemon = Daemon(options=self._options, clock=SYSTEM_CLOCK, random=random)
        self.fleet = Fleet(self.daemon, self._open_job)
        self.fleet.set_configured(config.databases)
        if config.registry.url:
            self.daemon.add(self._registry_job())
        self.health = Health(self.daemon, SYSTEM_CLOCK)
        self.endpoint: Endpoint | None = None
        if limits.metrics_listen:
            self.endpoint = Endpoint(limits.metrics_listen, self.daemon, self.health, self._budget)

    def run(
        self,
        stopping: SignalFlag,
        reloading: SignalFlag,
        reload: Callable[[], Config],
    ) -> bool:
        """Sweep until `stopping` is set; returns whether all sweeps ended in time.

        When `reloading` is set, the databases are taken from `reload()`; other settings stay.
        """
        with ExitStack() as cleanup:
            if self.endpoint is not None:
                self.endpoint.start()
                cleanup.callback(self.endpoint.close)
                log_event("metrics.started", address=self.endpoint.address)
            self._say_started()
            settle_memory()
            cleanup.callback(gc.unfreeze)
            self.daemon.start()
            while not stopping.wait(LOOK_S):
                self.health.beat()
                self.daemon.step()
                if reloading.is_set():
                    reloading.clear()
                    self.reload(reload)
            is_clean = self.daemon.stop(self._config.watchdog.stop_s)
        if is_clean:
            self._transport.close()
        log_event(
            "watchdog.stopped" if is_clean else "watchdog.abandoned",
            level=logging.INFO if is_clean else logging.ERROR,
        )
        return is_clean

    def reload(self, read: Callable[[], Config]) -> None:
        """Take the databases from the current configuration; keep the old ones if it is invalid."""
        try:
            config = read()
        except ConfigurationError as error:
            log_event("config.refused", level=logging.ERROR, error=str(error))
            return
        self.fleet.set_configured(config.databases)
        self.daemon.wake_all()
        log_event("config.reloaded", databases=len(config.databases))

    def _say_started(self) -> None:
        names = self.fleet.names
        shown = ",".join(names[:_NAMES_SHOWN_MAX]) + (",…" if names[_NAMES_SHOWN_MAX:] else "")
        log_event(
            "watchdog.started",
            databases=shown,
            count=len(names),
            broker=mask_secrets(self._config.broker.url),
            broker_from=self._broker_from,
            process=os.getpid(),
        )

    def _open_job(self, section: DatabaseSection) -> SweepJob:
        limits = self._config.watchdog
        sweep = Sweep(
            open_database(section, self._environment, limits),
            self._transport,
            SweepOptions.from_config(limits, seconds_max=limits.share_s),
            clock=SYSTEM_CLOCK,
            random=random,
        )
        return SweepJob(
            sweep,
            self._options,
            random,
            clock=SYSTEM_CLOCK,
            gate=self._gate,
            budget=self._budget,
        )

    def _registry_job(self) -> RegistryJob:
        return RegistryJob(
            open_registry(self._config, self._environment),
            self.fleet,
            self._options,
            refresh_s=self._config.registry.refresh_s,
            random=random,
        )


def settle_memory() -> None:
    """Exclude all current objects from later garbage collections, until `gc.unfreeze`.

    Each claim creates thousands of objects, so Python often searches old objects for garbage
    cycles. Scanning all modules each time took a fifth of a claim's time.
    """
    gc.collect()
    gc.freeze()
