"""Byte budgets scaled to the memory that this process may use.

The defaults of `ServiceLimits` and `FaceLimits` suit a machine with 2.3 GB or more. With less, or in a control group
with less, all of them are scaled down alike, so that their sum is about half of it, but none below
`BUDGET_BYTES_MIN`; the other half is for the rest of the broker. Budgets set by the operator do not change.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from qmq_broker.face.authentication.outside_files import read_bounded
from qmq_broker.face.limits import FaceLimits
from qmq_broker.service.limits import ServiceLimits

#: Their sum is the memory that requests may use; the share of a single token is part of one of them.
SERVICE_BUDGETS: Final = ("commit_queue_bytes", "groups_bytes")
FACE_BUDGETS: Final = ("bodies_bytes", "answers_bytes")
_PARTS: Final = ("groups_bytes_per_token", "dead_letters_memory_bytes")
#: No budget of the four is scaled below this: two of the longest requests.
BUDGET_BYTES_MIN: Final = 16 * 1024 * 1024
_FILE_BYTES_MAX: Final = 64 * 1024

Read = Callable[[str], str]


def _read(path: str) -> str:
    return read_bounded(path, _FILE_BYTES_MAX).decode(errors="replace")


def memory_bytes(read: Read = _read) -> int:
    """The machine's memory, or what the control groups of this process allow if that is less.

    `read` reads a file of the system; raises `OSError` if it is not there.
    """
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine_bytes, *_allowed(read)])


def _allowed(read: Read) -> Iterator[int]:
    """The limit of each control group of this process (cgroups(7), version 2 and 1)."""
    try:
        lines = read("/proc/self/cgroup").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            root, name = "/sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            root, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = path.strip("/").split("/")
        for count in range(len(parts) + 1):
            folder = "/".join([root, *parts[:count]])
            try:
                yield int(read(f"{folder}/{name}"))
            except (OSError, ValueError):  # not there, or "max"
                continue


def fit_budgets(
    service: ServiceLimits, face: FaceLimits, memory: int
) -> tuple[ServiceLimits, FaceLimits]:
    """The same limits with budgets that take about half of this memory."""
    budgets = [getattr(service, name) for name in SERVICE_BUDGETS]
    budgets += [getattr(face, name) for name in FACE_BUDGETS]
    share = memory / 2 / sum(budgets)
    if share >= 1:
        return service, face

    def scaled(limits: object, name: str, least: int = BUDGET_BYTES_MIN) -> int:
        whole: int = getattr(limits, name)
        return min(whole, max(least, int(whole * share)))

    return (
        replace(
            service,
            **{name: scaled(service, name) for name in SERVICE_BUDGETS},
            **{name: scaled(service, name, 1) for name in _PARTS},
        ),
        replace(face, **{name: scaled(face, name) for name in FACE_BUDGETS}),
    )
