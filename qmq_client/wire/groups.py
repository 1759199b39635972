"""How a group is named: `group`, or `group@consumer` for one consumer of a broadcast.

`@` is in no name, so that nobody can take the group of a broadcast for one of their own.
"""

from __future__ import annotations

from typing import Final

from msgspec import UNSET

from qmq_client.wire.names import check_name
from qmq_client.wire.requests import PullRequest, SettleRequest

_BETWEEN: Final = "@"


def group_of(request: PullRequest | SettleRequest) -> str:
    """The group that this request is for, as listings name it."""
    if request.broadcast is UNSET:
        return request.group
    return f"{request.group}{_BETWEEN}{request.consumer}"


def check_group(text: str) -> str:
    """Return `text` when it may name a group, else raise `InvalidNameError`."""
    group, between, consumer = text.partition(_BETWEEN)
    check_name(group, field="group")
    if between:
        check_name(consumer, field="group")
    return text
