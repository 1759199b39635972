"""How far a job is, for whoever wants to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a job is."""

    stage: str
    done: int
    total: int
    rows: int


OnProgress = Callable[[Progress], None]


def nobody(_: Progress) -> None:
    """For those who do not want to hear of progress."""
