"""The names of groups: `group`, or `group@consumer` for one consumer of a broadcast.

`@` is not allowed in names, so the group of a broadcast consumer never has the name of another group.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from msgspec import UNSET

from qmq_client.wire.names import check_name
from qmq_client.wire.requests import BroadcastMember, PullRequest, SettleRequest

_BETWEEN: Final = "@"
#: Most processes with one name that are remembered, far more than are started by mistake.
_REPLACED_MAX: Final = 16
#: Longer than the longest wait of a pull: a process that is silent for this long, and for a lease, counts as gone.
_SILENT_MS: Final = 60_000


def group_of(request: PullRequest | SettleRequest) -> str:
    """The name of this request's group, as in listings."""
    if request.broadcast is UNSET:
        return request.group
    return f"{request.group}{_BETWEEN}{request.consumer}"


class Instances:
    """The current process of one broadcast consumer: the latest one; earlier ones are refused.

    So a restarted process, also after a crash, gets its messages at once, and if two processes run
    with one name by mistake, one gets an error. A request of a dead process may be late and arrive
    after those of its successor: so a replaced process is admitted again once the other one has been
    silent.
    """

    __slots__ = ("_current", "_replaced", "_seen_ms")

    def __init__(self) -> None:
        self._current = ""
        self._replaced: deque[str] = deque(maxlen=_REPLACED_MAX)
        self._seen_ms = 0

    def seen(self, now_ms: int) -> None:
        """Record a sign of life: a settlement, which does not name its process."""
        self._seen_ms = now_ms

    def admits(self, request: PullRequest, now_ms: int) -> bool:
        """Whether this pull comes from the latest process; a pull that does not name its process is admitted."""
        if not isinstance(request.broadcast, BroadcastMember):
            return True
        instance = request.broadcast.instance
        silent_ms, is_replaced = now_ms - self._seen_ms, instance in self._replaced
        if is_replaced and silent_ms <= max(_SILENT_MS, request.lease_ms):
            return False
        self._seen_ms = now_ms
        if instance == self._current:
            return True
        if is_replaced:
            self._replaced.remove(instance)
        if self._current:
            self._replaced.append(self._current)
        self._current = instance
        return True


def replaced_text(request: PullRequest) -> str:
    """The error of the process that was replaced."""
    return (
        f"another process pulls as consumer {request.consumer} of group {request.group} on "
        f"{request.subject} now, and gets its messages"
    )


REPLACED_REMEDY: Final = (
    "End one of the two, or give each process its own consumer_id: a broadcast has one process "
    "for each name."
)


def check_group(text: str) -> str:
    """Return `text` if it is a valid group name, otherwise raise `InvalidNameError`."""
    group, between, consumer = text.partition(_BETWEEN)
    check_name(group, field="group")
    if between:
        check_name(consumer, field="group")
    return text
