"""Waits during an outage of the broker, or of the database of an inbox.

All threads of one `Consumers` use the same broker, so the first answer to any of them ends the
waits of the others. A wait still lasts at least `_LEAST_S`: a broker that answers one kind of call
but not another must not be called in a tight loop. An outage concerns the whole process, and is
logged once for all handlers.

While the database of an inbox is unreachable, no handler can start and no message is at fault: the
consumer returns its prefetched messages and pulls nothing. A probe finds out whether the database
works again: it writes an id that no message has, in a transaction that is rolled back. One consumer
of a process probes for all that use the same inbox.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.consumer.counters import Counters
from qmq_client.consumer.error_texts import error_text, in_one_line
from qmq_client.errors import BrokerBusyError, BrokerRefusedError, TransportError
from qmq_client.retry import Backoff

if TYPE_CHECKING:
    from qmq_client.inbox import Inbox
    from qmq_client.inbox.async_inbox import AsyncInbox

_LOG: Final = logging.getLogger("qmq.consumer")
#: Waits between unanswered calls. The longest one equals the `wait_ms` of an idle consumer, so that
#: an outage causes no more calls than normal operation; it bounds how late a recovery is noticed.
RETRY_BACKOFF: Final = Backoff(first_ms=100, factor=2.0, max_ms=1_000, jitter=0.2)
_LEAST_S: Final = 0.1
#: Time from one log line about an outage to the next: doubled each time, at most the second value.
_QUIET_S: Final = 10.0
_QUIET_S_MAX: Final = 3_600.0
#: After this long without a failure, the next one is logged at once.
_PEACE_S: Final = 60.0


class Marks(NamedTuple):
    """The state when a call began, so that events during the call are not missed."""

    answers: int
    wakes: int


class Outage:
    """An outage of one broker, during which threads wait. Thread safe."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._changed = threading.Condition()
        self._answers = 0
        self._wakes = 0
        self._is_open = False
        self._log = OutageLog("broker", clock)

    def marks(self) -> Marks:
        """Take them before a call, and pass them to `wait` if it fails."""
        return Marks(self._answers, self._wakes)

    def begin(self, call: str, consumer: str, error: TransportError) -> None:
        """Record that this call of this consumer got no answer."""
        with self._changed:
            self._is_open = True
            line = self._log.failed(f"call={call} consumer={consumer} error={error}")
        if line:
            _LOG.warning("%s", line)

    def end(self) -> None:
        """Record an answer: waiting threads continue. Costs nothing while no call has failed."""
        if not self._is_open:
            return
        with self._changed:
            self._is_open = False
            self._answers += 1
            self._changed.notify_all()
            line = self._log.answered()
        if line:
            _LOG.info("%s", line)

    def wake(self) -> None:
        """End every wait at once; for a stop."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def wait(self, seconds: float, seen: Marks) -> None:
        """Wait this long, or until a call was answered or `wake` came since `seen`."""
        least_s = min(seconds, _LEAST_S)
        with self._changed:
            if self._changed.wait_for(lambda: self._wakes != seen.wakes, least_s):
                return
            self._changed.wait_for(lambda: self.marks() != seen, seconds - least_s)


class OutageLog:
    """Decides which failures and answers of an outage are logged. One caller at a time.

    An outage is logged when it begins, at growing intervals while it lasts, and when it ends. An
    intermittent outage is logged as rarely as a lasting one.
    """

    def __init__(self, who: str, clock: Clock) -> None:
        self._who = who
        self._clock = clock
        self._failures = 0
        self._began_at_s = 0.0
        self._is_logged = False
        self._failed_at_s = self._quiet_until_s = float("-inf")
        self._quiet_s = _QUIET_S

    def failed(self, fields: str) -> str:
        """Record a failure; returns the line to log, if any, with these fields."""
        now_s = self._clock.monotonic_s()
        if now_s - self._failed_at_s >= _PEACE_S:
            self._quiet_until_s, self._quiet_s = now_s, _QUIET_S
        self._failed_at_s = now_s
        if not self._failures:
            self._began_at_s = now_s
        self._failures += 1
        if now_s < self._quiet_until_s:
            return ""
        self._quiet_until_s = now_s + self._quiet_s
        self._quiet_s = min(2 * self._quiet_s, _QUIET_S_MAX)
        self._is_logged = True
        return (
            f"{self._who}_unreachable seconds={now_s - self._began_at_s:.1f} "
            f"failures={self._failures} {fields}"
        )

    def answered(self) -> str:
        """End the outage, if there is one; returns the line to log, if any."""
        seconds, failures = self._clock.monotonic_s() - self._began_at_s, self._failures
        was_logged, self._is_logged, self._failures = self._is_logged, False, 0
        if not was_logged:
            return ""
        return f"{self._who}_reachable seconds={seconds:.1f} failures={failures}"


def is_outage(error: TransportError) -> bool:
    """Whether this error may end as soon as the broker answers any request.

    A refusal or a request to try later is itself an answer, so answers to other calls do not matter.
    """
    return not isinstance(error, BrokerBusyError | BrokerRefusedError)


class Failures:
    """Counts the failures in a row of one kind of call of one consumer, and computes the pause."""

    def __init__(self, call: str, consumer: str, outage: Outage) -> None:
        self._call = call
        self._consumer = consumer
        self._outage = outage
        self._count = 0
        #: The latest failures in the row that concern only this consumer.
        self._refusals = 0
        self._is_logged = False

    def answered(self) -> None:
        """Record that a call succeeded."""
        self._outage.end()
        if self._is_logged:
            _LOG.info("%s_resumed consumer=%s failures=%d", self._call, self._consumer, self._count)
        self._is_logged, self._count, self._refusals = False, 0, 0

    def pause_s(self, error: TransportError, *, is_meant: bool = False) -> float:
        """How long to wait after this failure. The 1st, 2nd, 4th, 8th … refusal in a row is logged.

        `is_meant`: this process ended the call itself, which is not logged.
        """
        self._count += 1
        is_of_all = is_outage(error)
        if is_of_all and not is_meant:
            self._outage.begin(self._call, self._consumer, error)
        pause_s = RETRY_BACKOFF.delay_ms(self._count, random.random()) / 1000
        if isinstance(error, BrokerBusyError):
            pause_s = max(pause_s, error.retry_after_s)
        self._refusals = 0 if is_of_all else self._refusals + 1
        is_logged = not is_of_all and self._refusals & (self._refusals - 1) == 0
        self._is_logged = self._is_logged or is_logged
        _LOG.log(
            logging.WARNING if is_logged else logging.DEBUG,
            "%s_failed consumer=%s failures=%d again_in_s=%.1f error=%s",
            self._call,
            self._consumer,
            self._count,
            pause_s,
            error,
        )
        return pause_s


#: Waits between two probes. The longest one limits the load on a returning server, with one probe
#: of each process in this time, and bounds how late its return is noticed.
PROBE_BACKOFF: Final = Backoff(first_ms=100, factor=2.0, max_ms=5_000, jitter=0.5)

#: A shorter rest of a pause counts as zero, because sums of seconds are rounded.
_PAUSE_S_MIN: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Prober:
    """A consumer that may probe for all consumers of its inbox."""

    #: Raises unless the inbox would accept a message now.
    probe: Callable[[], None]
    #: Whether a stop can end the probe; then the stop must wait until it has released its connection.
    can_be_cancelled: bool
    consumer: str
    counters: Counters


class InboxOutage:
    """The outage of consumers whose inboxes are in the same database table. Thread safe: one thread probes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._log = OutageLog("inbox", clock)
        self._probe_lock = threading.Lock()
        self._failures = 0
        #: Until this time the result of a failed probe is valid.
        self._again_at_s = float("-inf")
        #: The thread that probes instead of pulling and cannot be ended. It holds no message.
        self.puller: threading.Thread | None = None

    @property
    def is_open(self) -> bool:
        """Whether the last probe failed."""
        return self._failures > 0

    def is_cause(self, prober: Prober) -> bool:
        """After an error of the inbox: whether the database is unreachable for all messages."""
        if self.is_open:
            return True
        with self._probe_lock:
            return self._is_unreachable(prober)

    def pause_s(self, prober: Prober) -> float:
        """How long to wait before the next pull: 0 unless the database is still unreachable."""
        if not self.is_open:
            return 0.0
        if not self._probe_lock.acquire(
            blocking=False
        ):  # a probe may take as long as the driver's time-out
            return PROBE_BACKOFF.first_ms / 1000
        try:
            self.puller = None if prober.can_be_cancelled else threading.current_thread()
            return max(_PAUSE_S_MIN, self._left_s()) if self._is_unreachable(prober) else 0.0
        finally:
            self.puller = None
            self._probe_lock.release()

    def _is_unreachable(self, prober: Prober) -> bool:
        """The result of the last probe while it is valid, otherwise of a new one."""
        return self._left_s() >= _PAUSE_S_MIN or not self._is_over(prober)

    def _left_s(self) -> float:
        return self._again_at_s - self._clock.monotonic_s()

    def _is_over(self, prober: Prober) -> bool:
        try:
            prober.probe()
        except Exception as error:  # drivers raise various errors if the server is unreachable
            self._failures += 1
            delay_s = PROBE_BACKOFF.delay_ms(self._failures, random.random()) / 1000
            self._again_at_s = self._clock.monotonic_s() + delay_s
            prober.counters.add("inbox_failures")
            text = in_one_line(error_text(error))
            if line := self._log.failed(f"consumer={prober.consumer} error={text}"):
                _LOG.warning("%s", line)
            return False
        self._failures, self._again_at_s = 0, float("-inf")
        if line := self._log.answered():
            _LOG.info("%s consumer=%s", line, prober.consumer)
        return True


class InboxOutages:
    """The outages of inboxes of one process, by the place of the inbox."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._outages: dict[object, InboxOutage] = {}

    def of(self, inbox: Inbox | AsyncInbox | None) -> InboxOutage:
        """The outage of all inboxes at the same place; without an inbox one that never begins."""
        place = None if inbox is None else inbox.place
        return self._outages.setdefault(place, InboxOutage(self._clock))

    def pullers(self) -> set[threading.Thread]:
        """Threads that only probe, perhaps until their driver's time-out."""
        return {one.puller for one in self._outages.values() if one.puller is not None}
