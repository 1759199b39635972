"""What has become a dead letter since it was last told, for the log.

No consumer sees a message expire, or a last lease end in silence, and what consumers log is spread over
their processes; the broker sees every dead letter. Told by group and reason, at most once a minute for
each, so that a million expired messages are a few lines. Nothing of it survives a restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from qmq_broker.storage.logs.actions import Dead

#: The same group and reason are told at most this often: a line a minute is read, a thousand are not.
_BETWEEN_S: Final = 60.0
#: Lines of one `take`; what is left over goes first next time.
_LINES_MAX: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NewlyDead:
    """Dead letters of one group, for one reason."""

    subject: str
    group: str
    reason: str
    #: How many since this group and reason were last told.
    messages: int
    #: Of the first of them.
    first_sequence: int


@dataclass(slots=True, eq=False)
class _Untold:
    """A group and reason that is to be told, or was told lately."""

    first: Dead | None = None
    count: int = 0
    told_at_s: float = float("-inf")


class DeadTally:
    """Belongs to the loop thread."""

    def __init__(self) -> None:
        self._by_cause: dict[tuple[str, str, str], _Untold] = {}

    def note(self, action: Dead) -> None:
        """This message is a dead letter now."""
        cause = (action.subject, action.group, action.reason)
        untold = self._by_cause.get(cause)
        if untold is None:
            untold = self._by_cause[cause] = _Untold()
        untold.first = untold.first or action
        untold.count += 1

    def take(self, now_s: float) -> list[NewlyDead]:
        """What is to be told now, by a clock of monotonic seconds."""
        taken: list[NewlyDead] = []
        for cause, untold in list(self._by_cause.items()):
            if now_s - untold.told_at_s < _BETWEEN_S:
                continue
            if untold.first is None:
                del self._by_cause[cause]
            elif len(taken) < _LINES_MAX:
                taken.append(_newly_dead(untold.first, untold.count))
                self._by_cause[cause] = _Untold(told_at_s=now_s)
        return taken


def _newly_dead(first: Dead, count: int) -> NewlyDead:
    return NewlyDead(
        subject=first.subject,
        group=first.group,
        reason=first.reason,
        messages=count,
        first_sequence=first.sequence,
    )
