"""`qmq pipeline archive`: sealed segments of the logs as Parquet, verified before retention may delete them.

An archive is a folder of tables like any other: other jobs read it by `--tables`, and the source
`qmq` reads it like a log (`path`). Each segment is one range. A worker writes it and
verifies it; then it is committed. Sealed segments never change, so a segment is archived only once.
Before the first segment the broker is told that the archive exists, and after each commit how far
it reaches (`keeping.py`). Retention waits for it from then on.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from qmq_pipeline.errors import ExpiredRangeError, LakeError, SourceError
from qmq_pipeline.jobs.keeping import Keeping
from qmq_pipeline.jobs.log_tables import commit, prepared, written
from qmq_pipeline.jobs.progress import OnProgress, Progress, nobody
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.log import ACTION_LOG, COMMIT_LOG, LogBounds
from qmq_pipeline.places.options import Place
from qmq_pipeline.places.places import open_log, with_token
from qmq_pipeline.tables.commits import ARCHIVED, RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.log_end import LogEnd
from qmq_pipeline.tables.sequences import Runs, joined
from qmq_pipeline.work.ranges import TABLES_OF

if TYPE_CHECKING:
    from qmq_pipeline.sources.tasks import Workers

_WORK: Final = "qmq_pipeline.work.archive.archive_piece"
_LOGS: Final = (COMMIT_LOG, ACTION_LOG)
NO_BROKER: Final = "no broker was told of this archive (--broker URL)"
#: Segments in one commit.
_SEGMENTS_PER_COMMIT: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Archived:
    """What one run added, and how far the archive reaches."""

    segments: int
    messages: int
    #: Rows that, encoded again, had their producer's checksum.
    verified: int
    #: Rows whose bytes never were a record; stored as they are.
    not_records: int
    #: Subject → runs of sequences that the broker has in quarantine, so that the archive lacks them.
    quarantined: Runs
    #: Log → offset below which the archive has everything.
    next_offsets: dict[str, int]
    #: The name under which the broker waits for this archive; None if it does not wait …
    keeper: str | None
    #: … and the reason why not.
    not_waited_for: str


def archive(
    workers: Workers,
    config: PipelineConfig,
    *,
    keeping: Keeping | None = None,
    on_progress: OnProgress = nobody,
) -> Archived:
    """Archive every sealed segment that the folder `config.tables` does not have yet.

    `workers`: a session, or `LocalWorkers`. `keeping`: the broker whose retention is to wait for
    this archive; None for the broker that `config` reads from, if it reads from one. Raises a
    `PipelineError`; what was committed before it stays.
    """
    place, lake = prepared(config, "archived")
    run = _Run(workers, place, lake, _keeping(keeping, place), on_progress)
    facts: list[RangeFacts] = []
    next_offsets: dict[str, int] = {}
    with lake.writing():
        is_waited_for = run.begin()
        for log in _LOGS:
            made, next_offsets[log] = run.go(log)
            facts += made
    return Archived(
        segments=len(facts),
        messages=sum(one.rows for one in facts if "verified" in one.notes),
        verified=sum(int(one.notes.get("verified", 0)) for one in facts),
        not_records=sum(int(one.notes.get("not_records", 0)) for one in facts),
        quarantined=joined(one.lost for one in facts),
        next_offsets=next_offsets,
        keeper=run.keeping.name if is_waited_for else None,
        not_waited_for=run.keeping.not_waited_for,
    )


def _keeping(given: Keeping | None, place: Place) -> Keeping:
    """The broker to tell, with the token of the environment, like the place that is read."""
    if given is None:
        given = Keeping(place=place if place.broker_url else None)
    if given.place is None:
        return replace(given, not_waited_for=given.not_waited_for or NO_BROKER)
    return replace(given, place=with_token(given.place, os.environ))


class _Run:
    """One run. It tells the broker before the first segment and after each commit."""

    def __init__(
        self, workers: Workers, place: Place, lake: Lake, keeping: Keeping, on_progress: OnProgress
    ) -> None:
        self._workers = workers
        self._place = place
        self._lake = lake
        self.keeping = keeping
        self._on_progress = on_progress

    def begin(self) -> bool:
        """Check that this is the log in the archive, and tell the broker; whether retention waits for the rest."""
        known: dict[str, int] = {}
        for log in _LOGS:
            if last := self._last(log):
                known[log] = last.next
                for table in TABLES_OF[log]:
                    LogEnd(self._lake, table).sync()
                for place in dict.fromkeys((self._place, self.keeping.place or self._place)):
                    _check_same(place, self._lake, log, last)
        reader = open_log(self._place, COMMIT_LOG)
        try:
            store_id = reader.store_id
        finally:
            reader.close()
        return self.keeping.tell(store_id, known)

    def go(self, log: str) -> tuple[list[RangeFacts], int]:
        """Archive one log: what was added, and the offset below which everything is in the archive."""
        tables, place, lake = TABLES_OF[log], self._place, self._lake
        last = self._last(log)
        for table in tables:
            LogEnd(lake, table).clear_behind(last)
        reader = open_log(place, log)
        try:
            bounds, segment_bytes = reader.bounds(), reader.segment_bytes
        finally:
            reader.close()
        first = _first(place, log, bounds, last)
        bases = range(first - first % segment_bytes, bounds.next_offset, segment_bytes)
        sealed = [base for base in bases if base + segment_bytes <= bounds.next_offset]
        known = dict(last.notes.get("next_sequences", {})) if last else {}
        done: list[RangeFacts] = []
        for i in range(0, len(sealed), _SEGMENTS_PER_COMMIT):
            some = sealed[i : i + _SEGMENTS_PER_COMMIT]
            pieces = [_piece(place, lake, log, base, segment_bytes) for base in some]
            found = written(self._workers, _WORK, tables, pieces)
            is_from_start = first == 0 or last is not None
            known = commit(lake, tables, found, known, is_from_start=is_from_start)
            done += found[tables[0].name]
            self._tell(log, done[-1])
            rows, count = sum(one.rows for one in done), i + len(some)
            stage = f"archive {log}"
            self._on_progress(Progress(stage=stage, done=count, total=len(sealed), rows=rows))
        return done, sealed[-1] + segment_bytes if sealed else first

    def _tell(self, log: str, last: RangeFacts) -> None:
        place = self.keeping.place
        if place not in (None, self._place):
            _check_same(place, self._lake, log, last)
        self.keeping.tell(last.source, {log: last.next})

    def _last(self, log: str) -> RangeFacts | None:
        """The last segment of the archive; refuses a folder with ranges that nobody verified."""
        last = LogEnd(self._lake, TABLES_OF[log][0]).last()
        if last is not None and not last.notes.get(ARCHIVED):
            raise LakeError(
                path=self._lake.root,
                reason="its tables were ingested, which neither verifies rows nor waits for whole segments",
                remedy="Give the archive a folder of its own",
            )
        return last


def _first(place: Place, log: str, bounds: LogBounds, last: RangeFacts | None) -> int:
    """The offset where a run begins.

    Refuses a gap in the commit log. Actions may be gone if no broker waited for this archive.
    """
    if last is None:
        return bounds.first_offset
    if last.next < bounds.first_offset and log == COMMIT_LOG:
        raise ExpiredRangeError(
            source=place.name,
            reason=f"offsets {last.next} to {bounds.first_offset} of {log} were given up before they "
            "were archived",
            remedy="Archive more often; begin a new archive for what is there",
        )
    return max(last.next, bounds.first_offset)


def _check_same(place: Place, lake: Lake, log: str, last: RangeFacts) -> None:
    """Check that the log at this place is the archived one, up to the `last` archived segment."""
    reader = open_log(place, log)
    try:
        if reader.store_id != last.source:
            raise SourceError(
                source=place.name,
                reason=f"it is store {reader.store_id}, and the archive {lake.root} is of {last.source}",
                remedy="Give each broker an archive of its own",
            )
        is_same = reader.has_stamp(*last.notes.get("last_frame", (-1, 0)))
        if last.next > reader.bounds().next_offset or not is_same:
            raise SourceError(
                source=place.name,
                reason=f"its {log} is not the one that was archived up to offset {last.next}: was it "
                "restored from a backup?",
                remedy="Begin another archive, with a keeper of its own (--keeper NAME)",
            )
    finally:
        reader.close()


def _piece(place: Place, lake: Lake, log: str, base: int, segment_bytes: int) -> dict[str, Any]:
    return {
        "place": asdict(place),
        "folder": lake.root,
        "log": log,
        "first": base,
        "after": base + segment_bytes,
    }
