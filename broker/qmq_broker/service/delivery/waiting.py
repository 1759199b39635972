"""Pulls that wait for messages, first come first served within a group.

One message wakes one pull of each group; a pull that leaves messages wakes the next. So a
hundred waiting consumers do not all run for one message. An unused wake-up is passed on, and a
consumer that would get no message is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from qmq_broker.errors import BusyError

GroupKey = tuple[str, str]


@dataclass(slots=True, kw_only=True, eq=False)
class WaitingPull:
    """One pull that waits; woken at most once."""

    key: GroupKey
    wake: Callable[[], None]
    consumer: str
    is_woken: bool = field(default=False)


class WaitingPulls:
    """All waiting pulls of the broker. Belongs to the loop thread."""

    def __init__(self, pulls_max: int, is_held_back: Callable[[GroupKey, str], bool]) -> None:
        """`is_held_back` says whether a pull of this group and consumer would get no message now."""
        self._pulls_max = pulls_max
        self._is_held_back = is_held_back
        self._by_subject: dict[str, dict[str, dict[WaitingPull, None]]] = {}
        self.count = 0

    def add(self, key: GroupKey, wake: Callable[[], None], *, consumer: str = "") -> WaitingPull:
        """Add a waiting pull; raises `BusyError` if too many wait."""
        if self.count >= self._pulls_max:
            raise BusyError(
                f"{self.count} pulls wait for messages; allowed: {self._pulls_max}",
                retry_after_s=1.0,
                field="waiting pulls",
                limit=str(self._pulls_max),
                value=str(self.count),
            )
        pull = WaitingPull(key=key, wake=wake, consumer=consumer)
        subject, group = key
        self._by_subject.setdefault(subject, {}).setdefault(group, {})[pull] = None
        self.count += 1
        return pull

    def leave(self, pull: WaitingPull) -> None:
        """Remove a pull that no longer waits, for any reason."""
        subject, group = pull.key
        groups = self._by_subject.get(subject, {})
        pulls = groups.get(group, {})
        if pull not in pulls:
            return
        del pulls[pull]
        self.count -= 1
        if not pulls:
            del groups[group]
            if not groups:
                del self._by_subject[subject]

    def wake_subject(self, subject: str) -> int:
        """Wake one pull of each group of a subject with new messages; returns how many."""
        groups = list(self._by_subject.get(subject, ()))
        return sum(self.wake_group((subject, group)) for group in groups)

    def wake_group(self, key: GroupKey) -> int:
        """Wake the first pull of a group that has messages; returns how many."""
        subject, group = key
        for pull in self._by_subject.get(subject, {}).get(group, ()):
            if not self._is_held_back(key, pull.consumer):
                self._wake(pull)
                return 1
        return 0

    def wake_all(self) -> int:
        """Wake all pulls, so that they are answered; returns how many."""
        pulls = [
            pull
            for groups in self._by_subject.values()
            for waiting in groups.values()
            for pull in waiting
        ]
        for pull in pulls:
            self._wake(pull)
        return len(pulls)

    def _wake(self, pull: WaitingPull) -> None:
        self.leave(pull)
        pull.is_woken = True
        pull.wake()
