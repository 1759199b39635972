"""How many connections fit beside the files that the broker must be able to open.

A connection costs a descriptor, and each process has a limited number of them. Nobody may fill that
limit with idle connections and keep the broker from its own files. Not for: the limit of the whole
machine, which nobody can reserve; reaching it refuses requests (`FilesFullError`).
"""

from __future__ import annotations

import resource
from dataclasses import replace
from typing import Final

from qmq_broker.face.limits import FaceLimits

#: Connections that wait to be accepted: that many may briefly be open beyond their bound.
BACKLOG: Final = 128
#: Segments, checkpoints, the lock, logs, the loop's own: about 20, and two more for each GiB.
_OTHER_FILES: Final = 128
#: With fewer connections a broker is useless.
_CONNECTIONS_MIN: Final = 16


def raise_files_limit() -> int:
    """Raise the limit of open files as far as this process may; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):
        # Some systems name a hard limit that they do not grant.
        return soft
    return hard


def fit_connections(limits: FaceLimits, *, files: int, queue_files: int) -> FaceLimits | None:
    """The same bounds with as many connections as fit into `files`; None if hardly any do."""
    if files == resource.RLIM_INFINITY:
        return limits
    room = files - queue_files - _OTHER_FILES - BACKLOG
    if room >= limits.connections:
        return limits
    if room < _CONNECTIONS_MIN:
        return None
    share = limits.connections_per_address / limits.connections
    per_address = max(1, min(limits.connections_per_address, int(room * share)))
    return replace(limits, connections=room, connections_per_address=per_address)


def files_needed(queue_files: int) -> int:
    """With fewer than these a broker does not start."""
    return queue_files + _OTHER_FILES + BACKLOG + _CONNECTIONS_MIN
