"""How long to wait between calls while the broker does not answer, and when to stop waiting.

All threads of one `Consumers` ask the same broker, so the first answer that any of them gets ends
the waits of the others. A wait still lasts at least `_LEAST_S`: a broker that answers one kind of
call but not another must not be asked in a tight loop.
"""

from __future__ import annotations

import logging
import random
import threading
from typing import Final, NamedTuple

from qmq_client.errors import BrokerBusyError, BrokerRefusedError, TransportError
from qmq_client.retry import Backoff

_LOG: Final = logging.getLogger("qmq.consumer")
#: Between calls that the broker did not answer. The cap is the `wait_ms` of an idle consumer, so that
#: an outage costs the broker no more calls than peace does, and what comes back late is late by that.
RETRY_BACKOFF: Final = Backoff(first_ms=100, factor=2.0, max_ms=1_000, jitter=0.2)
_LEAST_S: Final = 0.1


class Marks(NamedTuple):
    """What had happened when a call began, so that nothing that happens during it is missed."""

    answers: int
    wakes: int


class Outage:
    """Where threads wait for one broker to come back. Thread safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._answers = 0
        self._wakes = 0
        self._is_open = False

    def marks(self) -> Marks:
        """To be taken before a call, and given to `wait` when it failed."""
        return Marks(self._answers, self._wakes)

    def begin(self) -> None:
        """A call got no answer."""
        self._is_open = True

    def end(self) -> None:
        """A call was answered: whoever waits need not. Costs nothing while nobody has failed."""
        if not self._is_open:
            return
        with self._changed:
            self._is_open = False
            self._answers += 1
            self._changed.notify_all()

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

    def answered(self) -> None:
        """The broker did what it was asked."""
        self._outage.end()
        if self._count:
            _LOG.info("%s_resumed consumer=%s failures=%d", self._call, self._consumer, self._count)
            self._count = 0

    def pause_s(self, error: TransportError, *, is_meant: bool = False) -> float:
        """How long to wait after this failure. Logged at the 1st, 2nd, 4th, 8th … of a row.

        `is_meant`: we ended the call ourselves, and nobody needs to hear of it.
        """
        self._count += 1
        if is_outage(error):
            self._outage.begin()
        pause_s = RETRY_BACKOFF.delay_ms(self._count, random.random()) / 1000
        if isinstance(error, BrokerBusyError):
            pause_s = max(pause_s, error.retry_after_s)
        is_told = not is_meant and self._count & (self._count - 1) == 0
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
