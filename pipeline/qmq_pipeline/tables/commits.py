"""What the commit files of the tables say: which files hold which range, and which commits count.

Values and their JSON; the folder is the affair of `lake.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

#: Notes of a range of the commit log: records whose bytes do not have the checksum they carry, and how many.
ALTERED: Final = "altered"
ALTERED_COUNT: Final = "altered_count"
#: Note of a range that retention gave up before it was read.
EXPIRED: Final = "is_expired"
#: Notes of a scan of an outbox: when, ms since 1970 by the database's clock; and of merged scans that of the last one
#: that had rows.
SCANNED_AT: Final = "scanned_at_ms"
SCANNED_UNTIL: Final = "scanned_until_ms"
#: Note of a commit that small ones were merged into: when, ms since 1970.
MERGED_AT: Final = "merged_at_ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One Parquet file of a range."""

    #: Below the table's folder.
    path: str
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeFacts:
    """What was written of one range."""

    #: What the range is of: the id of a store, or the name of a database.
    source: str
    first: int
    next: int
    rows: int
    files: tuple[DataFile, ...]
    #: subject → runs of sequences (first, next), in order of the log.
    sequences: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    #: subject → runs that stand in quarantine.
    lost: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    #: Times of storing of the first and last row, ms since 1970; 0 without rows.
    first_at_ms: int = 0
    last_at_ms: int = 0
    #: Whatever else the job wants to know next time.
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Ranges that became part of a table together."""

    name: str
    version: int
    ranges: tuple[RangeFacts, ...]
    #: Names of earlier commits that this one stands for.
    replaces: tuple[str, ...] = ()
    #: What the table stood on when this was made; says whether it is up to date.
    notes: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """As it stands in its file."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Commit:
        """As it was written; what older versions did not write is empty."""
        found = json.loads(text)
        return cls(
            name=found["name"],
            version=found["version"],
            ranges=tuple(range_facts(one) for one in found["ranges"]),
            replaces=tuple(found["replaces"]),
            notes=found.get("notes", {}),
        )


def range_facts(found: Mapping[str, Any]) -> RangeFacts:
    """Facts as they were written into a commit, or came from a worker."""
    return RangeFacts(**{**found, "files": tuple(DataFile(**one) for one in found["files"])})
