"""The names of groups: `group`, or `group@consumer` for one consumer of a broadcast.

`@` is in no name, so that the group of a broadcast never has the name of another group.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from msgspec import UNSET

from qmq_client.wire.names import check_name
from qmq_client.wire.requests import BroadcastMember, PullRequest, SettleRequest

_BETWEEN: Final = "@"
#: Processes under one name that are remembered: far more than anybody starts by mistake.
_REPLACED_MAX: Final = 16
#: Longer than a pull may wait: a process that said nothing for so long, and for a lease, is gone.
_SILENT_MS: Final = 60_000


def group_of(request: PullRequest | SettleRequest) -> str:
    """The group that this request is for, as listings name it."""
    if request.broadcast is UNSET:
        return request.group
    return f"{request.group}{_BETWEEN}{request.consumer}"


class Instances:
    """Which process is one consumer of a broadcast: the latest to come; those that it replaced are refused.

    So a process that is started again, also after a crash, gets its messages at once, and of two that
    run under one name by mistake, one gets an error. A request of a dead process may be late and arrive after
    those of its successor: so a replaced process is admitted again once the other one has been silent.
    """

    __slots__ = ("_current", "_replaced", "_seen_ms")

    def __init__(self) -> None:
        self._current = ""
        self._replaced: deque[str] = deque(maxlen=_REPLACED_MAX)
        self._seen_ms = 0

    def seen(self, now_ms: int) -> None:
        """Note a sign of life: a settlement, which does not say of which process."""
        self._seen_ms = now_ms

    def admits(self, request: PullRequest, now_ms: int) -> bool:
        """Whether this pull comes from the latest process; one that does not say is let through."""
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
        f"{request.subject} since, and gets its messages"
    )


REPLACED_REMEDY: Final = (
    "End one of the two, or give each process a consumer_id of its own: a broadcast has one process "
    "for each name."
)


def check_group(text: str) -> str:
    """Return `text` when it may name a group, else raise `InvalidNameError`."""
    group, between, consumer = text.partition(_BETWEEN)
    check_name(group, field="group")
    if between:
        check_name(consumer, field="group")
    return text
