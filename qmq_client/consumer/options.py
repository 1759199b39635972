"""The settings of one handler and of the start of a new group, checked once at construction."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from qmq_client.errors import ConfigurationError
from qmq_client.retry import Backoff
from qmq_client.wire import start as wire
from qmq_client.wire.backoff import JITTER
from qmq_client.wire.errors import InvalidMessageError
from qmq_client.wire.names import check_name, check_not_own
from qmq_client.wire.shown import shorten

#: Where a new group begins: a word, a time, or a sequence.
Start = str | datetime | int

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_REMEDY: Final = 'Give "earliest", "latest", a datetime with a zone, or a sequence from 0.'


def start_text(start: Start) -> str:
    """The start as a text in the form of `wire/start.py`; raises `ConfigurationError`."""
    try:
        return str(wire.parse_start(_text(start)))
    except InvalidMessageError as error:
        raise _wrong(start) from error


def _text(start: object) -> str:
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise _wrong(start)
        return f"time:{(start - _EPOCH) // timedelta(milliseconds=1)}"
    if isinstance(start, bool) or not isinstance(start, int | str):
        raise _wrong(start)
    return f"sequence:{start}" if isinstance(start, int) else start


def _wrong(start: object) -> ConfigurationError:
    return ConfigurationError(setting="start", value=shorten(start), remedy=_REMEDY)


CONCURRENCY_MAX: Final = 256
BATCH_SIZE_MAX: Final = 1_000
#: Most prefetched messages: bounds memory, and how many messages a crash returns.
PREFETCH_MAX: Final = 1_000
#: The broker's limits.
ATTEMPTS_MAX: Final = 1_000
LEASE_MS_MIN: Final = 100
LEASE_MS_MAX: Final = 12 * 3_600_000
WAIT_MS_MAX: Final = 50_000
BACKOFF_MS_MAX: Final = 24 * 3_600_000

#: Most tags of a filter; beyond that use a separate subject.
FILTER_TAGS_MAX: Final = 16

_FLAGS: Final = ("auto_ack", "ordered", "at_most_once")
_RANGES: Final = {
    "concurrency": (1, CONCURRENCY_MAX),
    "max_attempts": (1, ATTEMPTS_MAX),
    "lease_ms": (LEASE_MS_MIN, LEASE_MS_MAX),
    "lease_ms_max": (LEASE_MS_MIN, LEASE_MS_MAX),
    "timeout_ms": (0, LEASE_MS_MAX),
    "batch_size": (1, BATCH_SIZE_MAX),
    "max_wait_ms": (0, WAIT_MS_MAX),
    "wait_ms": (0, WAIT_MS_MAX),
    "prefetch_max": (0, PREFETCH_MAX),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """Settings of one handler."""

    subject: str
    group: str
    #: Handler calls that may run at the same time in this process.
    concurrency: int = 1
    #: Deliveries of one message before it becomes a dead letter.
    max_attempts: int = 16
    #: How long the broker waits for a sign of life; extended while the handler runs.
    lease_ms: int = 30_000
    #: The lease of a handler that runs longer is no longer extended, and its message is delivered again.
    lease_ms_max: int = 600_000
    #: Longest run of a handler call; then its messages are nacked with that reason. An asynchronous
    #: call is cancelled; a plain one cannot be. 0 for no limit.
    timeout_ms: int = 0
    #: Messages per handler call; above 1 the handler takes a list.
    batch_size: int = 1
    #: How long messages may wait for a batch to fill: half the lease at most.
    max_wait_ms: int = 0
    #: Duration of a long poll. A stop waits for a running poll, so that its messages can be returned at once.
    wait_ms: int = 1_000
    #: Most prefetched messages, even for a fast handler. 0 for the default: 1,000, up to 3,000 with
    #: large batches, and with `at_most_once` only as many as can start at once.
    prefetch_max: int = 0
    #: Where a new group begins: "earliest", "latest", a `datetime`, or a sequence.
    start: Start = "earliest"
    #: False: the handler settles its `Delivery` itself.
    auto_ack: bool = True
    #: Only messages with at least one of these tags …
    tags: tuple[str, ...] = ()
    #: … and with all of these. Both are kept with the group.
    all_tags: tuple[str, ...] = ()
    #: Start a message only when the previous one of its key is settled.
    ordered: bool = False
    #: Ack messages before they are handled: each is delivered once or, if the process dies, lost.
    at_most_once: bool = False
    #: Every consumer gets every message: True while it runs; "named" also those stored while it was stopped.
    broadcast: bool | Literal["named"] = False
    #: How long the group waits before it redelivers a message; None for the broker's default.
    backoff: Backoff | None = None

    def __post_init__(self) -> None:
        check_not_own(check_name(self.subject, field="subject"))
        check_name(self.group, field="group")
        for setting in ("tags", "all_tags"):
            object.__setattr__(self, setting, _as_tags(setting, getattr(self, setting)))
        object.__setattr__(self, "start", start_text(self.start))
        for setting, (lowest, highest) in _RANGES.items():
            value = getattr(self, setting)
            if not isinstance(value, int) or not lowest <= value <= highest:
                raise ConfigurationError(
                    setting=setting,
                    value=repr(value),
                    remedy=f"Give a whole number from {lowest} to {highest}.",
                )
        self._check_words()
        self._check_times()
        self._check_backoff()
        self._check_at_most_once()

    def _check_words(self) -> None:
        for setting in _FLAGS:
            if not isinstance(value := getattr(self, setting), bool):
                raise ConfigurationError(
                    setting=setting, value=shorten(value), remedy="Give True or False."
                )
        if not isinstance(self.broadcast, bool) and self.broadcast != "named":
            remedy = 'Give True, or "named" for consumers that restart under their consumer_id.'
            raise ConfigurationError(
                setting="broadcast", value=shorten(self.broadcast), remedy=remedy
            )

    def _check_times(self) -> None:
        held_ms = max(self.lease_ms, self.lease_ms_max)
        if self.timeout_ms > held_ms and not self.at_most_once:
            raise ConfigurationError(
                setting="timeout_ms",
                value=f"{self.timeout_ms}, with a lease of up to {held_ms}",
                remedy="By then another consumer has the message; raise lease_ms_max as well.",
            )
        wait_ms_max = self.lease_ms // 2
        if self.max_wait_ms > wait_ms_max and not self.at_most_once:
            raise ConfigurationError(
                setting="max_wait_ms",
                value=str(self.max_wait_ms),
                remedy=f"With a lease_ms of {self.lease_ms} give {wait_ms_max} at most, or the lease ends "
                "while a batch fills.",
            )

    def _check_backoff(self) -> None:
        if self.backoff is None:
            return
        if not isinstance(self.backoff, Backoff):
            value, remedy = shorten(self.backoff), "Give a qmq_client.Backoff."
        elif self.backoff.max_ms > BACKOFF_MS_MAX:
            value = f"max_ms={self.backoff.max_ms}"
            remedy = f"Give {BACKOFF_MS_MAX} (a day) at most; for longer, raise Retry(after=…)."
        elif self.backoff.jitter != JITTER:
            value = f"jitter={self.backoff.jitter}"
            remedy = "Leave it out: the broker makes each wait shorter by up to a fifth."
        else:
            return
        raise ConfigurationError(setting="backoff", value=value, remedy=remedy)

    def _check_at_most_once(self) -> None:
        for setting in ("ordered", "backoff"):
            if self.at_most_once and getattr(self, setting):
                raise ConfigurationError(
                    setting=setting,
                    value="with at_most_once",
                    remedy="Leave it out: a message that is acked before its delivery is never redelivered.",
                )
        if self.at_most_once and not self.auto_ack:
            raise ConfigurationError(
                setting="auto_ack",
                value="False, with at_most_once",
                remedy="Leave auto_ack at True: there is nothing to settle.",
            )

    @property
    def working_set(self) -> int:
        """How many messages keep every worker busy while none waits."""
        return self.concurrency * self.batch_size

    @property
    def prefetched_max(self) -> int:
        """Most prefetched messages; with `at_most_once` few, since they are lost with the process."""
        if self.prefetch_max:
            return self.prefetch_max
        if self.at_most_once:
            return self.working_set
        # With large batches: one batch for each worker, one that waits, and one that is being pulled.
        return min(max(PREFETCH_MAX, 3 * self.working_set), 3 * PREFETCH_MAX)

    @property
    def name(self) -> str:
        """Subject and group, for logs."""
        return f"{self.subject}/{self.group}"


def _as_tags(setting: str, tags: object) -> tuple[str, ...]:
    listed = (tags,) if isinstance(tags, str) else tags
    if not isinstance(listed, Iterable):
        raise ConfigurationError(
            setting=setting, value=shorten(tags), remedy="Give a tuple of names."
        )
    names = tuple(check_name(tag, field=setting) for tag in listed)
    if len(names) > FILTER_TAGS_MAX:
        raise ConfigurationError(
            setting=setting,
            value=f"{len(names)} tags",
            remedy=f"Give {FILTER_TAGS_MAX} at most, or send such messages to a subject of their own.",
        )
    return names


def check_settings(names: Iterable[str], known: Collection[str] = ()) -> None:
    """Raise `ConfigurationError` for a name that is not a setting of a consumer, or not in `known`."""
    if not known:
        own = {each.name for each in fields(ConsumerOptions)} - {"subject", "group"}
        known = own | {"inbox", "on_stale", "middleware"}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise ConfigurationError(
                setting=name,
                value="not a setting of a consumer",
                remedy=f"{hint}All are listed in help(qmq_client.consumer): "
                f"{', '.join(sorted(known))}.",
            )
