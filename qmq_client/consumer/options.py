"""What can be set for one handler, checked once, with the reasons for the defaults."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Final

from qmq_client.errors import ConfigurationError
from qmq_client.wire.names import check_name

CONCURRENCY_MAX: Final = 256
BATCH_SIZE_MAX: Final = 1_000
#: More than this is never pulled ahead: it bounds memory and what a crash gives back.
PREFETCH_MAX: Final = 1_000
#: The broker's bounds.
ATTEMPTS_MAX: Final = 1_000
LEASE_MS_MIN: Final = 100
LEASE_MS_MAX: Final = 12 * 3_600_000
WAIT_MS_MAX: Final = 50_000

_RANGES: Final = {
    "concurrency": (1, CONCURRENCY_MAX),
    "max_attempts": (1, ATTEMPTS_MAX),
    "lease_ms": (LEASE_MS_MIN, LEASE_MS_MAX),
    "lease_ms_max": (LEASE_MS_MIN, LEASE_MS_MAX),
    "timeout_ms": (0, LEASE_MS_MAX),
    "batch_size": (1, BATCH_SIZE_MAX),
    "max_wait_ms": (0, WAIT_MS_MAX),
    "wait_ms": (0, WAIT_MS_MAX),
    "prefetch_max": (1, PREFETCH_MAX),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """Settings of one handler."""

    subject: str
    group: str
    #: Handler calls at the same time in this process.
    concurrency: int = 1
    #: Deliveries of one message before it becomes a dead letter.
    max_attempts: int = 16
    #: How long the broker waits for a sign of life; prolonged while the handler runs.
    lease_ms: int = 30_000
    #: A handler that runs longer loses its message to another attempt.
    lease_ms_max: int = 600_000
    #: A handler call that runs longer has its messages given back with that reason; an asynchronous
    #: one is cancelled, a plain one cannot be. 0 for no such limit.
    timeout_ms: int = 0
    #: Messages per handler call; above 1 the handler takes a list.
    batch_size: int = 1
    #: How long messages may wait for a batch to fill.
    max_wait_ms: int = 0
    #: Long poll. A stop waits for the poll under way, so that what it brings is given back at once.
    wait_ms: int = 1_000
    #: Most messages in hand, however fast the handler is.
    prefetch_max: int = PREFETCH_MAX
    #: Where a new group begins: "earliest" or "latest".
    start: str = "earliest"
    #: False: the handler settles its `Delivery` by itself.
    auto_ack: bool = True

    def __post_init__(self) -> None:
        check_name(self.subject, field="subject")
        check_name(self.group, field="group")
        for setting, (lowest, highest) in _RANGES.items():
            value = getattr(self, setting)
            if not isinstance(value, int) or not lowest <= value <= highest:
                raise ConfigurationError(
                    setting=setting,
                    value=repr(value),
                    remedy=f"Give a whole number from {lowest} to {highest}.",
                )
        if self.start not in {"earliest", "latest"}:
            raise ConfigurationError(
                setting="start", value=repr(self.start), remedy='Give "earliest" or "latest".'
            )

    @property
    def working_set(self) -> int:
        """Messages that keep every worker busy and none waiting."""
        return self.concurrency * self.batch_size

    @property
    def name(self) -> str:
        """Subject and group, for logs."""
        return f"{self.subject}/{self.group}"


def check_settings(names: Iterable[str]) -> None:
    """Raise `ConfigurationError` for a name that is no setting of a consumer."""
    known = {each.name for each in fields(ConsumerOptions)} - {"subject", "group"}
    known |= {"inbox", "on_stale", "middleware"}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise ConfigurationError(
                setting=name,
                value="no setting of a consumer",
                remedy=f"{hint}All are listed in help(qmq_client.consumer): "
                f"{', '.join(sorted(known))}.",
            )
