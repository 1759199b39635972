"""The progress of a job, for callers that show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a job."""

    stage: str
    done: int
    total: int
    rows: int


OnProgress = Callable[[Progress], None]


def no_progress(_: Progress) -> None:
    """Ignore progress."""
