"""The times that an audit can judge, because both sides are known for them, and what it cannot judge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from qmq_pipeline.jobs.deliveries import actions_end, folded
from qmq_pipeline.jobs.ingest_outbox import last_scans
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.tables.commits import ALTERED, ALTERED_COUNT, EXPIRED, RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import MESSAGES
from qmq_pipeline.tables.sequences import count_in, joined, named

#: How far the clocks of a database and the broker may differ.
_CLOCKS_MS: Final = 3_600_000
#: If the action log is not folded to its end; contains no "; ", which separates reasons.
_NOT_FOLDED: Final = (
    "actions came in since `lifecycle` was run: deliveries are counted up to there, and what groups "
    "set aside is not judged"
)
#: For a folder that only `archive` has written to, which notes no time; no "; " here either.
_NOT_READ: Final = "the log was archived and not ingested, so nothing is judged: up to when it is known is not noted"
#: For tables that no log was read into; no "; " here either.
_NO_LOG: Final = (
    "no log was ingested, so nothing is judged: name it with --path or --broker, or configure the "
    "broker's address"
)
#: For messages that the broker has in quarantine; no "; " here either.
_QUARANTINED: Final = (
    "of the log were damaged, and the broker has them in quarantine: they are lost where an outbox "
    "knows them, and not judged otherwise"
)
#: For a database without `keep_sent_s`; no "; " here either.
_ROWS_GO: Final = (
    "does not keep accepted rows: `committed` counts only those that a scan has seen. Messages that "
    "came and went between two scans are judged by the log alone (stored once, unaltered, in time if "
    "delayed, and delivered), but not for losses and ghosts. Set keep_sent_s of the database longer "
    "than the time between two scans"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What can be judged, and what cannot."""

    #: Commits between these times are judged; ms since 1970.
    first_ms: int
    next_ms: int
    #: Times of the log that retention deleted before they were ingested.
    gaps: tuple[tuple[int, int], ...]
    #: Whether the log was ever ingested: otherwise nothing can be judged, and that is not clean.
    is_log_known: bool
    #: Whether the action log is known up to its end, and so what each group did with its messages.
    is_folded: bool
    #: Databases that keep accepted rows, so that a message without a row is a ghost.
    kept: tuple[str, ...]
    coverage: tuple[str, ...]
    #: Number of sequences that the broker has in quarantine.
    quarantined: int = 0

    def is_judged(self, time_ms: int) -> bool:
        """Whether a time is in the window and in no gap."""
        is_here = self.first_ms <= time_ms < self.next_ms
        return is_here and not any(first <= time_ms < after for first, after in self.gaps)


def judged_window(lake: Lake, config: PipelineConfig) -> Window:
    """The window in which both sides are known."""
    options = config.audit
    grace_ms = round(options.grace_s * 1000)
    ranges, scans = lake.ranges(MESSAGES), last_scans(lake)
    quarantined = joined(one.lost for one in ranges)
    read_at_ms = int(lake.read_state(MESSAGES).get("read_at_ms", 0))
    first_ms = ranges[0].first_at_ms + grace_ms if _has_lost_beginning(ranges) else 0
    next_ms = min([read_at_ms, *scans.values()]) - grace_ms
    until_ms = next_ms if options.until_ms is None else options.until_ms
    kept = [one.name for one in config.databases if one.keep_sent_s > 0]
    kept = list(scans) if options.are_rows_kept else kept
    known = folded(lake)
    is_folded = actions_end(lake) <= (known.actions if known else 0)
    return Window(
        first_ms=max(first_ms, options.since_ms or 0),
        next_ms=max(0, min(next_ms, until_ms)),
        gaps=tuple(_gaps(ranges, next_ms, grace_ms)),
        is_log_known=read_at_ms > 0,
        is_folded=is_folded,
        kept=tuple(kept),
        quarantined=count_in(quarantined),
        coverage=(
            *([] if ranges else [_NO_LOG]),
            *([] if read_at_ms or not ranges else [_NOT_READ]),
            *([] if scans else ["no outbox was scanned: losses and ghosts cannot be told"]),
            *([] if is_folded else [_NOT_FOLDED]),
            *_log_coverage(ranges, first_ms),
            *([f"{named(quarantined)} {_QUARANTINED}"] if quarantined else []),
            *(f"database {name} {_ROWS_GO}" for name in sorted(set(scans) - set(kept))),
        ),
    )


def _has_lost_beginning(ranges: Sequence[RangeFacts]) -> bool:
    return bool(ranges) and ranges[0].first > 0


def _gaps(ranges: Sequence[RangeFacts], next_ms: int, grace_ms: int) -> Iterator[tuple[int, int]]:
    """Times around each range that expired unread: from its neighbours, or to the end."""
    for number, one in enumerate(ranges):
        if one.notes.get(EXPIRED):
            before = ranges[number - 1].last_at_ms - grace_ms if number else 0
            is_last = number + 1 == len(ranges)
            after = next_ms if is_last else ranges[number + 1].first_at_ms + grace_ms
            yield before, after


def _log_coverage(ranges: Sequence[RangeFacts], first_ms: int) -> Iterator[str]:
    """What is not known of the log."""
    named = sum(len(one.notes.get(ALTERED, ())) for one in ranges)
    unnamed = sum(one.notes.get(ALTERED_COUNT, 0) for one in ranges) - named
    if unnamed:
        yield f"{unnamed} more messages are altered than are named"
    if _has_lost_beginning(ranges):
        yield f"the log was first read from offset {ranges[0].first} on, at {_iso(first_ms)}"
    for one in ranges:
        if one.notes.get(EXPIRED):
            yield f"offsets {one.first} to {one.next} of the log expired before they were read"


def judged_ranges(ranges: Sequence[RangeFacts], window: Window) -> list[RangeFacts]:
    """The ranges of the log to compare; leaves out those stored before anything judged was committed."""
    first_ms = window.first_ms - _CLOCKS_MS
    return [one for one in ranges if one.last_at_ms >= first_ms]


def between(column: str, window: Window) -> str:
    """The SQL condition that a time is judged."""
    millis = f"unix_millis({column})"
    parts = [f"{millis} >= {window.first_ms}", f"{millis} < {window.next_ms}"]
    parts += [f"NOT ({millis} >= {first} AND {millis} < {after})" for first, after in window.gaps]
    return " AND ".join(parts)


def _iso(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat()
