"""The contents of the tables' commit files: which files hold which range, and which commits count.

Only values and their JSON; `lake.py` writes and reads the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

#: Notes of a range of the commit log: altered records, and their number.
ALTERED: Final = "altered"
ALTERED_COUNT: Final = "altered_count"
#: Note of a range of an archive: a whole segment that was verified and synced before its commit.
ARCHIVED: Final = "is_archived"
#: Note of a range that retention deleted before it was read.
EXPIRED: Final = "is_expired"
#: Notes of a scan of an outbox: its time, ms since 1970 by the database's clock; for merged scans,
#: the time of the last one with rows.
SCANNED_AT: Final = "scanned_at_ms"
SCANNED_UNTIL: Final = "scanned_until_ms"
#: Note of a commit that replaces small ones: the time, ms since 1970.
MERGED_AT: Final = "merged_at_ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One Parquet file of a range."""

    #: Path below the table's folder.
    path: str
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeFacts:
    """What was written of one range."""

    #: Where the range comes from: the id of a store, or the name of a database.
    source: str
    first: int
    next: int
    rows: int
    files: tuple[DataFile, ...]
    #: subject → runs of sequences (first, next), in order of the log.
    sequences: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    #: subject → quarantined runs.
    lost: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    #: Times of storing of the first and last row, ms since 1970; 0 without rows.
    first_at_ms: int = 0
    last_at_ms: int = 0
    #: Anything else that the job wants to know next time.
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Ranges that became part of a table together."""

    name: str
    version: int
    ranges: tuple[RangeFacts, ...]
    #: Names of earlier commits that this one replaces.
    replaces: tuple[str, ...] = ()
    #: What the table was made from; tells whether it is up to date.
    notes: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The content of its file."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Commit:
        """Read what `to_json` wrote; what older versions did not write is empty."""
        found = json.loads(text)
        return cls(
            name=found["name"],
            version=found["version"],
            ranges=tuple(range_facts(one) for one in found["ranges"]),
            replaces=tuple(found["replaces"]),
            notes=found.get("notes", {}),
        )


def range_facts(found: Mapping[str, Any]) -> RangeFacts:
    """Facts from a commit or a worker's answer."""
    return RangeFacts(**{**found, "files": tuple(DataFile(**one) for one in found["files"])})
