"""Settings of a producer, checked once when they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from qmq_client.errors import ConfigurationError
from qmq_client.retry import Backoff
from qmq_client.wire.limits import DEFAULT_LIMITS, Limits

_RANGES: Final[dict[str, tuple[int, int]]] = {
    "takeover_ms": (100, 3_600_000),
    "queue_messages": (1, 10_000_000),
    "batch_messages": (1, 10_000),
    "batch_bytes": (1, 1024 * 1024 * 1024),
    "linger_ms": (0, 1_000),
    "delete_delay_ms": (0, 60_000),
    "max_attempts": (1, 1_000_000),
    "buffer_bytes": (1, 1024 * 1024 * 1024),
    "breaker_failures": (1, 1_000_000),
    "breaker_first_ms": (1, 3_600_000),
    "breaker_max_ms": (1, 3_600_000),
    "keep_sent_s": (1, 366 * 86_400),
}

_MAY_BE_NONE: Final = frozenset({"keep_sent_s"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerOptions:
    """How a producer publishes. The defaults keep every promise."""

    #: How long only this process may send a row; after that a watchdog takes it over.
    takeover_ms: int = 5_000
    #: Committed messages that may wait in memory; what is over falls to the watchdog.
    queue_messages: int = 10_000
    #: Messages of one request.
    batch_messages: int = 1_000
    #: Bytes of records in one request.
    batch_bytes: int = 1024 * 1024
    #: Under load, how long to gather a batch; when idle a message is sent at once.
    linger_ms: int = 20
    #: How long to gather deletes of accepted rows.
    delete_delay_ms: int = 250
    #: Attempts that the broker answered badly before a row is parked.
    max_attempts: int = 50
    #: Waits between the attempts of one row.
    backoff: Backoff = field(default_factory=Backoff)
    #: Bytes of records that may wait in one transaction before they are written early.
    buffer_bytes: int = 1024 * 1024
    #: Requests without an answer, one after the other, after which the broker is left alone.
    breaker_failures: int = 3
    #: How long it is left alone the first time; doubles up to the next. What commits meanwhile falls
    #: to the watchdog after `takeover_ms`, so a look for the broker comes before that.
    breaker_first_ms: int = 500
    breaker_max_ms: int = 3_000
    #: What one message and one frame may measure; as the broker has it.
    limits: Limits = DEFAULT_LIMITS
    #: SQLite: how transactions of the application's engine begin. DEFERRED lets a transaction that
    #: read before it writes fail when the publisher wrote in between; IMMEDIATE waits instead.
    #: `@transactional` and `transaction` always use IMMEDIATE.
    sqlite_begin: Literal["DEFERRED", "IMMEDIATE"] = "DEFERRED"
    #: Write each message at its send and look for it again before the commit: two statements more.
    #: For applications that use the driver's own connection beside SQLAlchemy's, and swallow errors.
    strict: bool = False
    #: Messages of one subject and key are accepted in the order of their commits. Transactions that
    #: send under one key then wait for each other, and a message that cannot be sent stops those
    #: behind it. All producers of the database must agree.
    order_by_key: bool = False
    #: Audit: keep the rows of accepted messages this long; None to delete them. The watchdog's
    #: chores remove them afterwards.
    keep_sent_s: int | None = None
    #: Publish from a thread of its own. False: only inside `flush` and `close`, in the caller's.
    background: bool = True
    #: Called by the publisher with the ids of accepted messages: in its thread, between two requests,
    #: so be quick; without a thread in that of `flush` and `close`. What it raises is logged.
    on_sent: Callable[[Sequence[str]], object] | None = None
    #: Called likewise with id and error of a message that was not accepted this time.
    on_failed: Callable[[str, str], object] | None = None

    def __post_init__(self) -> None:
        for name, (lowest, highest) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            if not isinstance(value, int) or not lowest <= value <= highest:
                raise _refuse(name, value, f"Give {lowest} to {highest}.")
        if self.breaker_max_ms < self.breaker_first_ms:
            raise _refuse("breaker_max_ms", self.breaker_max_ms, "Give at least breaker_first_ms.")
        if self.sqlite_begin not in ("DEFERRED", "IMMEDIATE"):
            raise _refuse("sqlite_begin", self.sqlite_begin, "Give DEFERRED or IMMEDIATE.")


def _refuse(name: str, value: object, remedy: str) -> ConfigurationError:
    return ConfigurationError(setting=f"ProducerOptions.{name}", value=repr(value), remedy=remedy)
