"""How long to wait between calls while the broker does not answer, when to stop waiting, and what to log.

All threads of one `Consumers` ask the same broker, so the first answer that any of them gets ends
the waits of the others. A wait still lasts at least `_LEAST_S`: a broker that answers one kind of
call but not another must not be asked in a tight loop. An outage is one thing of a process, and is
logged as one, however many handlers find it.
"""

from __future__ import annotations

import logging
import random
import threading
from typing import Final, NamedTuple

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.errors import BrokerBusyError, BrokerRefusedError, TransportError
from qmq_client.retry import Backoff

_LOG: Final = logging.getLogger("qmq.consumer")
#: Between calls that the broker did not answer. The cap is the `wait_ms` of an idle consumer, so that
#: an outage costs the broker no more calls than peace does, and what comes back late is late by that.
RETRY_BACKOFF: Final = Backoff(first_ms=100, factor=2.0, max_ms=1_000, jitter=0.2)
_LEAST_S: Final = 0.1
#: From a line about an outage to the next: twice as long each time, and at most the second.
_QUIET_S: Final = 10.0
_QUIET_S_MAX: Final = 3_600.0
#: Without a failure for so long, the next one is news, and logged at once.
_PEACE_S: Final = 60.0


class Marks(NamedTuple):
    """What had happened when a call began, so that nothing that happens during it is missed."""

    answers: int
    wakes: int


class Outage:
    """Where threads wait for one broker to come back. Thread safe."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._changed = threading.Condition()
        self._answers = 0
        self._wakes = 0
        self._is_open = False
        self._log = OutageLog("broker", clock)

    def marks(self) -> Marks:
        """To be taken before a call, and given to `wait` when it failed."""
        return Marks(self._answers, self._wakes)

    def begin(self, call: str, consumer: str, error: TransportError) -> None:
        """This call of this consumer got no answer."""
        with self._changed:
            self._is_open = True
            line = self._log.failed(f"call={call} consumer={consumer} error={error}")
        if line:
            _LOG.warning("%s", line)

    def end(self) -> None:
        """A call was answered: whoever waits need not. Costs nothing while nobody has failed."""
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
    """What is said of failures and answers: a line, or nothing. One caller at a time.

    An outage is told when it begins, less and less often while it lasts, and when it ends. One that
    comes and goes is told as rarely as one that lasts.
    """

    def __init__(self, who: str, clock: Clock) -> None:
        self._who = who
        self._clock = clock
        self._failures = 0
        self._began_at_s = 0.0
        self._is_told = False
        self._failed_at_s = self._quiet_until_s = float("-inf")
        self._quiet_s = _QUIET_S

    def failed(self, fields: str) -> str:
        """The next one: the line to log, if any, with these fields of this failure."""
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
        self._is_told = True
        return (
            f"{self._who}_unreachable seconds={now_s - self._began_at_s:.1f} "
            f"failures={self._failures} {fields}"
        )

    def answered(self) -> str:
        """The outage, if there was one, is over: the line to log, if any."""
        seconds, failures = self._clock.monotonic_s() - self._began_at_s, self._failures
        was_told, self._is_told, self._failures = self._is_told, False, 0
        if not was_told:
            return ""
        return f"{self._who}_reachable seconds={seconds:.1f} failures={failures}"


def is_outage(error: TransportError) -> bool:
    """Whether this may end as soon as the broker answers anybody.

    Who was refused, or asked to come back later, was answered: others' answers change nothing.
    """
    return not isinstance(error, BrokerBusyError | BrokerRefusedError)


class Failures:
    """One kind of call of one consumer: counts what fails in a row, and says how long to wait."""

    def __init__(self, call: str, consumer: str, outage: Outage) -> None:
        self._call = call
        self._consumer = consumer
        self._outage = outage
        self._count = 0
        #: Of the last ones of the row, those that are about this consumer alone.
        self._refusals = 0
        self._is_told = False

    def answered(self) -> None:
        """The broker did what it was asked."""
        self._outage.end()
        if self._is_told:
            _LOG.info("%s_resumed consumer=%s failures=%d", self._call, self._consumer, self._count)
        self._is_told, self._count, self._refusals = False, 0, 0

    def pause_s(self, error: TransportError, *, is_meant: bool = False) -> float:
        """How long to wait after this failure. A refusal is logged at the 1st, 2nd, 4th, 8th … of a row.

        `is_meant`: we ended the call ourselves, and nobody needs to hear of it.
        """
        self._count += 1
        is_of_all = is_outage(error)
        if is_of_all and not is_meant:
            self._outage.begin(self._call, self._consumer, error)
        pause_s = RETRY_BACKOFF.delay_ms(self._count, random.random()) / 1000
        if isinstance(error, BrokerBusyError):
            pause_s = max(pause_s, error.retry_after_s)
        self._refusals = 0 if is_of_all else self._refusals + 1
        is_told = not is_of_all and self._refusals & (self._refusals - 1) == 0
        self._is_told = self._is_told or is_told
        _LOG.log(
            logging.WARNING if is_told else logging.DEBUG,
            "%s_failed consumer=%s failures=%d again_in_s=%.1f error=%s",
            self._call,
            self._consumer,
            self._count,
            pause_s,
            error,
        )
        return pause_s
