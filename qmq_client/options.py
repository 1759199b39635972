"""Settings of a producer, checked once when they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

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
    "breaker_failures": (1, 1_000_000),
    "breaker_first_ms": (1, 3_600_000),
    "breaker_max_ms": (1, 3_600_000),
    "keep_sent_s": (1, 366 * 86_400),
}

_MAY_BE_NONE: Final = frozenset({"keep_sent_s"})
_KINDS: Final[dict[str, tuple[type, str]]] = {
    "backoff": (Backoff, "Give a qmq_client.Backoff."),
    "limits": (Limits, "Give Limits of qmq_client.wire.limits."),
    "strict": (bool, "Give True or False."),
    "order_by_key": (bool, "Give True or False."),
    "background": (bool, "Give True or False."),
}
_FUNCTIONS: Final = ("on_sent", "on_failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerOptions:
    """How a producer publishes. The defaults keep every promise."""

    #: How long only this process may send a row; after that a watchdog may take it over.
    takeover_ms: int = 5_000
    #: Committed messages that may wait in memory; the watchdog sends what does not fit.
    queue_messages: int = 10_000
    #: Messages in one request.
    batch_messages: int = 4_000
    #: Bytes of records in one request.
    batch_bytes: int = 1024 * 1024
    #: How long to collect a batch under load; when idle, a message is sent at once.
    linger_ms: int = 20
    #: How long to collect accepted rows before one statement deletes them.
    delete_delay_ms: int = 250
    #: Failed attempts, not counting outages of the broker, before a row is parked.
    max_attempts: int = 50
    #: How long to wait between the attempts of one row.
    backoff: Backoff = field(default_factory=Backoff)
    #: Consecutive requests without an answer after which sending pauses.
    breaker_failures: int = 3
    #: The first pause; each later one is twice as long, up to `breaker_max_ms`. Keep that below
    #: `takeover_ms`, after which the watchdog takes over the rows committed in the meantime.
    breaker_first_ms: int = 500
    breaker_max_ms: int = 3_000
    #: Size limits of messages and frames; must match those of the broker.
    limits: Limits = DEFAULT_LIMITS
    #: Refuse to send in a session whose transaction also runs on another engine, because the two
    #: commits are not atomic; and read each row back after its INSERT: one more statement, on MySQL
    #: two.
    strict: bool = False
    #: Messages of one subject and key are accepted in the order of their commits. Transactions that
    #: send with the same key then wait for each other, and a message that cannot be sent holds up
    #: those after it. All producers of one database must use the same setting.
    order_by_key: bool = False
    #: For audits: how long to keep the rows of accepted messages; None deletes them at once. The
    #: watchdog removes them afterwards.
    keep_sent_s: int | None = None
    #: Publish on a background thread. False: only inside `flush` and `close`, on the caller's thread.
    background: bool = True
    #: Called with the ids of accepted messages, on the publisher's thread between two requests, so it
    #: must be quick; without a thread, on the caller's inside `flush` and `close`. Errors are logged.
    on_sent: Callable[[Sequence[str]], object] | None = None
    #: Called in the same way with the id and error of a message that was not accepted this time.
    on_failed: Callable[[str, str], object] | None = None

    def __post_init__(self) -> None:
        for name, (lowest, highest) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if not is_number or not lowest <= value <= highest:
                raise _refuse(name, value, f"Give {lowest} to {highest}.")
        if self.breaker_max_ms < self.breaker_first_ms:
            raise _refuse("breaker_max_ms", self.breaker_max_ms, "Give at least breaker_first_ms.")
        self._check_kinds()

    def _check_kinds(self) -> None:
        for name, (kind, remedy) in _KINDS.items():
            if not isinstance(value := getattr(self, name), kind):
                raise _refuse(name, value, remedy)
        for name in _FUNCTIONS:
            if (value := getattr(self, name)) is not None and not callable(value):
                raise _refuse(name, value, "Give a function.")


def _refuse(name: str, value: object, remedy: str) -> ConfigurationError:
    return ConfigurationError(setting=f"ProducerOptions.{name}", value=repr(value), remedy=remedy)
