"""`qmq pipeline archive`: sealed segments of the logs as Parquet, proven before anybody may delete them.

An archive is a folder of tables like any other: `--tables` of the other jobs may name it, and the source `qmq` reads
it like a log (`path`). Each segment is one range, written and verified by a worker, synced, and then committed.
Sealed segments never change, so one that is archived is archived for good. The broker is told of each that is (`keeping.py`),
and before the first one that this archive is there: from then on retention waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from qmq_pipeline.errors import ExpiredRangeError, SourceError
from qmq_pipeline.jobs.keeping import Keeping
from qmq_pipeline.jobs.log_tables import commit, prepared, written
from qmq_pipeline.jobs.progress import OnProgress, Progress, nobody
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.log import ACTION_LOG, COMMIT_LOG, LogBounds
from qmq_pipeline.places.options import Place
from qmq_pipeline.places.places import open_log, with_token
from qmq_pipeline.tables.commits import RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.work.ranges import TABLES_OF

if TYPE_CHECKING:
    from qmq_pipeline.sources.tasks import Workers

_WORK: Final = "qmq_pipeline.work.archive.archive_piece"
NO_BROKER: Final = "no broker was told of this archive (--broker URL)"
#: Segments that are archived before they are committed.
_SEGMENTS_PER_COMMIT: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Archived:
    """What one run added, and how far the archive reaches."""

    segments: int
    messages: int
    #: Rows that were encoded again and had their producer's checksum.
    verified: int
    #: Rows of bytes that never were a record; kept as they are.
    not_records: int
    #: Log → offset below which everything is in the archive.
    next_offsets: dict[str, int]
    #: By which name the broker waits for this archive; None when it does not …
    keeper: str | None
    #: … and then why.
    not_waited_for: str


def archive(
    workers: Workers,
    config: PipelineConfig,
    *,
    keeping: Keeping | None = None,
    on_progress: OnProgress = nobody,
) -> Archived:
    """Archive every sealed segment that is not yet in the folder `config.tables`; `workers`: a session, or `LocalWorkers`.

    `keeping`: the broker whose retention is to wait for this archive; None for the one that `config` reads from, if
    it reads from one. Raises a `PipelineError`; what was committed before it stays.
    """
    place, lake = prepared(config, "archived")
    keeping = _keeping(keeping, place)
    facts: list[RangeFacts] = []
    next_offsets: dict[str, int] = {}
    with lake.writing():
        store_id = _checked_store(place, lake)
        known = {log: _end(lake, log) for log in (COMMIT_LOG, ACTION_LOG)}
        is_waited_for = keeping.tell(store_id, known)
        for log in (COMMIT_LOG, ACTION_LOG):
            tell = partial(_told, keeping, store_id, log)
            made, next_offsets[log] = _archive_log(
                workers, place, lake, log, tell, on_progress=on_progress
            )
            facts += made
    return Archived(
        segments=len(facts),
        messages=sum(one.rows for one in facts if "verified" in one.notes),
        verified=sum(int(one.notes.get("verified", 0)) for one in facts),
        not_records=sum(int(one.notes.get("not_records", 0)) for one in facts),
        next_offsets=next_offsets,
        keeper=keeping.name if is_waited_for else None,
        not_waited_for=keeping.not_waited_for,
    )


def _keeping(given: Keeping | None, place: Place) -> Keeping:
    """Whom to tell; with the token of the environment, as the place that is read from."""
    if given is None:
        given = Keeping(place=place if place.broker_url else None)
    if given.place is None:
        return replace(given, not_waited_for=given.not_waited_for or NO_BROKER)
    return replace(given, place=with_token(given.place, os.environ))


def _told(keeping: Keeping, store_id: str, log: str, next_offset: int) -> None:
    keeping.tell(store_id, {log: next_offset})


def _end(lake: Lake, log: str) -> int:
    """Below it everything of the log is in the archive; 0 while nothing is."""
    ranges = lake.ranges(TABLES_OF[log][0])
    return ranges[-1].next if ranges else 0


def _archive_log(
    workers: Workers,
    place: Place,
    lake: Lake,
    log: str,
    tell: Callable[[int], None],
    *,
    on_progress: OnProgress,
) -> tuple[list[RangeFacts], int]:
    tables = TABLES_OF[log]
    for table in tables:
        lake.sweep(table)
    reader = open_log(place, log)
    try:
        bounds, segment_bytes = reader.bounds(), reader.segment_bytes
    finally:
        reader.close()
    last = _last(lake, log, bounds, place)
    # Actions that nobody waited for are gone: only they may be missing.
    first = bounds.first_offset if last is None else max(last.next, bounds.first_offset)
    bases = range(first - first % segment_bytes, bounds.next_offset, segment_bytes)
    sealed = [base for base in bases if base + segment_bytes <= bounds.next_offset]
    known = dict(last.notes.get("next_sequences", {})) if last else {}
    done: list[RangeFacts] = []
    for i in range(0, len(sealed), _SEGMENTS_PER_COMMIT):
        some = sealed[i : i + _SEGMENTS_PER_COMMIT]
        pieces = [_piece(place, lake, log, base, segment_bytes) for base in some]
        found = written(workers, _WORK, tables, pieces)
        is_from_start = first == 0 or last is not None
        known = commit(lake, tables, found, known, is_from_start=is_from_start)
        tell(some[-1] + segment_bytes)
        done += found[tables[0].name]
        rows = sum(one.rows for one in done)
        on_progress(
            Progress(stage=f"archive {log}", done=i + len(some), total=len(sealed), rows=rows)
        )
    return done, sealed[-1] + segment_bytes if sealed else first


def _piece(place: Place, lake: Lake, log: str, base: int, segment_bytes: int) -> dict[str, Any]:
    return {
        "place": asdict(place),
        "folder": lake.root,
        "log": log,
        "first": base,
        "after": base + segment_bytes,
    }


def _checked_store(place: Place, lake: Lake) -> str:
    """The store at this place; refuses another one than that of the archive."""
    reader = open_log(place, COMMIT_LOG)
    try:
        store_id = reader.store_id
    finally:
        reader.close()
    for log in (COMMIT_LOG, ACTION_LOG):
        for one in lake.ranges(TABLES_OF[log][0])[-1:]:
            if one.source != store_id:
                raise SourceError(
                    source=place.name,
                    reason=f"it is store {store_id}, and the archive {lake.root} is of {one.source}",
                    remedy="Give each broker an archive of its own",
                )
    return store_id


def _last(lake: Lake, log: str, bounds: LogBounds, place: Place) -> RangeFacts | None:
    """The last segment of the archive; refuses a gap."""
    ranges = lake.ranges(TABLES_OF[log][0])
    if not ranges:
        return None
    last = ranges[-1]
    if last.next < bounds.first_offset and log == COMMIT_LOG:
        raise ExpiredRangeError(
            source=place.name,
            reason=f"offsets {last.next} to {bounds.first_offset} of {log} were given up before they "
            "were archived",
            remedy="Archive more often; begin a new archive for what is there",
        )
    return last
