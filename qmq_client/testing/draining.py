"""`drain`: runs handlers on the calling thread until no messages are left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from qmq_client.consumer import Consumers

_PASSES_MAX: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainReport:
    """The result of `drain`."""

    #: Messages that went through a handler, each attempt counted.
    handled: int
    #: Outcomes that the broker accepted.
    settled: int
    #: Calls to the broker that failed; the passes after them were still made once.
    failures: int


def drain(consumers: Consumers) -> DrainReport:
    """Pull, handle and settle until neither the broker nor this process has due messages.

    Does not wait: a later redelivery is due only according to the broker's clock.
    Starts only the thread of the event loop of async handlers, which ends with `consumers`. Raises
    exits of handlers, such as `KeyboardInterrupt`, after returning prefetched messages. Requires:
    `consumers` was not started.
    """
    handled = settled = failures = 0
    for _ in range(_PASSES_MAX):
        count = 0
        for member in consumers.members:
            pulled = member.pull_once(is_blocking=False)
            while work := member.work_once(is_blocking=False).count:
                handled += work
                count += work
                _raise_exit(consumers)
            sent = member.settle_once()
            failures += pulled.has_failed + sent.has_failed
            settled += sent.count
            count += pulled.count + sent.count
        if not count:
            break
    return DrainReport(handled=handled, settled=settled, failures=failures)


def _raise_exit(consumers: Consumers) -> None:
    if consumers.exit_error is None:
        return
    for member in consumers.members:
        member.stop()
        member.settle_once()
    raise consumers.exit_error
