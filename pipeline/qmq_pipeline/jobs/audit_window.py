"""The times that an audit can judge, because both sides are known for them, and what it cannot judge."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from qmq_pipeline.jobs.ingest import lost_sequences
from qmq_pipeline.jobs.lifecycle import bronze_progress
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.log import ACTION_LOG, COMMIT_LOG
from qmq_pipeline.tables.schemas import LOG
from qmq_pipeline.tables.sequences import count_in, named
from qmq_pipeline.tables.store import Tables

#: How far the clocks of a database and the broker may differ.
CLOCKS_MS: Final = 3_600_000
#: If the action log is not folded to its end; contains no "; ", which separates reasons.
_NOT_FOLDED: Final = (
    "`lifecycle` has not folded all actions, or the log does not have their messages yet: deliveries are counted "
    "up to there, and what groups set aside or skipped is not judged"
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


def judged_window(tables: Tables, config: PipelineConfig) -> Window:
    """The window in which both sides are known."""
    options, known = config.audit, bronze_progress(tables)
    grace_ms = round(options.grace_s * 1000)
    scans: dict[str, int] = known.get("scans", {})
    quarantined = lost_sequences(tables)
    read_at_ms = int(known.get("read_at_ms", 0))
    has_log = COMMIT_LOG in known
    begun = _late_beginning(tables)
    first_ms = 0 if begun is None else begun[1] + grace_ms
    next_ms = min([read_at_ms, *scans.values()]) - grace_ms
    until_ms = next_ms if options.until_ms is None else options.until_ms
    kept = [one.name for one in config.databases if one.keep_sent_s > 0]
    kept = list(scans) if options.are_rows_kept else kept
    lived = tables.progress("lifecycle")
    is_folded = known.get(ACTION_LOG, 0) <= lived.get("actions", 0)
    expired = _expired(tables, next_ms, grace_ms)
    return Window(
        first_ms=max(first_ms, options.since_ms or 0),
        next_ms=max(0, min(next_ms, until_ms)),
        gaps=tuple(one.times_ms for one in expired),
        is_log_known=read_at_ms > 0,
        is_folded=is_folded,
        kept=tuple(kept),
        quarantined=count_in(quarantined),
        coverage=(
            *([] if has_log else [_NO_LOG]),
            *([] if read_at_ms or not has_log else [_NOT_READ]),
            *([] if scans else ["no outbox was scanned: losses and ghosts cannot be told"]),
            *([] if is_folded else [_NOT_FOLDED]),
            *([_begun_text(begun, first_ms)] if begun is not None else []),
            *(
                f"offsets {one.first} to {one.next} of the log expired before they were read"
                for one in expired
            ),
            *([f"{named(quarantined)} {_QUARANTINED}"] if quarantined else []),
            *(f"database {name} {_ROWS_GO}" for name in sorted(set(scans) - set(kept))),
        ),
    )


def _late_beginning(tables: Tables) -> tuple[int, int] | None:
    """Offset and time of the first row, if the log was not read from its beginning on."""
    log = tables.read(LOG).where("kind <> 'expired'")
    part = log.selectExpr("MIN(part)").collect()[0][0]
    if part is None or int(part) == 0:
        return None
    found = log.where(f"part = {part}").selectExpr(
        "MIN(physical_offset) AS first", "unix_millis(MIN(stored_at)) AS at_ms"
    )
    row = found.collect()[0]
    return int(row["first"]), int(row["at_ms"])


@dataclass(frozen=True, slots=True)
class _Expired:
    first: int
    next: int
    times_ms: tuple[int, int]


#: Ranges that expired, with the times of their neighbours.
_EXPIRED: Final = """
SELECT e.first, e.next, unix_millis(MAX(m.stored_at) FILTER (WHERE m.physical_offset < e.next)) AS before,
       unix_millis(MIN(m.stored_at) FILTER (WHERE m.physical_offset >= e.next)) AS after
FROM (SELECT physical_offset AS first, physical_offset + count AS next FROM {log} WHERE kind = 'expired') e
LEFT JOIN (SELECT physical_offset, stored_at FROM {log} WHERE kind = 'message') m
GROUP BY e.first, e.next ORDER BY e.first
"""


def _expired(tables: Tables, next_ms: int, grace_ms: int) -> list[_Expired]:
    """Ranges that retention deleted unread, and the times around each: from its neighbours, or to the end."""
    log = tables.read(LOG)
    if not log.where("kind = 'expired'").limit(1).collect():
        return []
    return [
        _Expired(
            int(row["first"]),
            int(row["next"]),
            (
                0 if row["before"] is None else int(row["before"]) - grace_ms,
                next_ms if row["after"] is None else int(row["after"]) + grace_ms,
            ),
        )
        for row in tables.spark.sql(_EXPIRED, log=log).collect()
    ]


def _begun_text(begun: tuple[int, int], first_ms: int) -> str:
    return f"the log was first read from offset {begun[0]} on, at {_iso(first_ms)}"


def between(column: str, window: Window) -> str:
    """The SQL condition that a time is judged."""
    millis = f"unix_millis({column})"
    parts = [f"{millis} >= {window.first_ms}", f"{millis} < {window.next_ms}"]
    parts += [f"NOT ({millis} >= {first} AND {millis} < {after})" for first, after in window.gaps]
    return " AND ".join(parts)


def _iso(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat()
