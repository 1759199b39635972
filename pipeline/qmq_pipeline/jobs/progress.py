"""How far a job is, for callers that want to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from qmq_pipeline.tables.sequences import Runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a job is."""

    stage: str
    done: int
    total: int
    rows: int
    #: Table → rows that were committed since this was told last.
    added: Mapping[str, int] = field(default_factory=dict)
    #: What turned out to be in quarantine since then.
    quarantined: Runs = field(default_factory=dict)


OnProgress = Callable[[Progress], None]


def nobody(_: Progress) -> None:
    """Ignores progress."""
