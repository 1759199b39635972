"""`qmq pipeline ingest`: the logs into bronze tables; goes on where the last run ended.

The driver cuts what is new into ranges, workers write them, the driver commits some dozens at a time.
Nothing is kept but the commits: they say up to where each log was read, and with which stamp the last
frame ended, so that a log that was restored to an older state is not taken for the one that was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.errors import ExpiredRangeError, SourceError
from qmq_pipeline.jobs.log_tables import Written, commit, prepared, written
from qmq_pipeline.jobs.progress import OnProgress, Progress, nobody
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.log import ACTION_LOG, COMMIT_LOG, LogBounds, LogReader
from qmq_pipeline.places.options import Place
from qmq_pipeline.places.places import open_log
from qmq_pipeline.tables.commits import RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import ACTIONS, MESSAGES, TABLES
from qmq_pipeline.tables.table import Table
from qmq_pipeline.work.ranges import TABLES_OF

if TYPE_CHECKING:
    from qmq_pipeline.sources.tasks import Workers

_WORK: Final = "qmq_pipeline.work.ranges.ingest_piece"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingested:
    """What one run added."""

    rows: dict[str, int]
    #: Log → offset that the next run goes on from.
    next_offsets: dict[str, int]
    #: Sequences that stand in quarantine, in the ranges of this run.
    quarantined: int
    ranges: int


def ingest(
    workers: Workers,
    config: PipelineConfig,
    *,
    skip_expired: bool = False,
    on_progress: OnProgress = nobody,
) -> Ingested:
    """Bring messages, delayed messages and actions up to the durable end of the logs.

    `workers`: a session, or `LocalWorkers`. `skip_expired`: go on behind what retention has given up, and note the gap, instead of failing.
    Raises a `PipelineError`; what was committed before it stays.
    """
    place, lake = prepared(config, "read")
    done = Ingested(rows={}, next_offsets={}, quarantined=0, ranges=0)
    with lake.writing():
        for log in (COMMIT_LOG, ACTION_LOG):
            run = _Run(workers, config, place, lake, log)
            done = run.go(done, skip_expired=skip_expired, on_progress=on_progress)
    return done


class _Run:
    """One log in one run."""

    def __init__(
        self, workers: Workers, config: PipelineConfig, place: Place, lake: Lake, log: str
    ) -> None:
        self._workers = workers
        self._config = config
        self._place = place
        self._lake = lake
        self._log = log
        self._tables: Sequence[Table] = TABLES_OF[log]

    def go(self, before: Ingested, *, skip_expired: bool, on_progress: OnProgress) -> Ingested:
        known_end = max((one.next for one in self._lake.ranges(self._tables[0])), default=0)
        for table in self._tables[1:]:
            self._lake.cut(table, known_end)
        for table in self._tables:
            self._lake.sweep(table)
        reader = open_log(self._place, self._log)
        try:
            read_at_ms = SYSTEM_CLOCK.now_ms()
            bounds = reader.bounds()
            last = self._last(bounds)
            gap = self._check_continued(reader, bounds, last, skip_expired=skip_expired)
            first = bounds.first_offset if last is None or gap is not None else last.next
            ranges = reader.ranges(first, bounds.next_offset, self._config.partition_bytes)
        finally:
            reader.close()
        known = dict(last.notes.get("next_sequences", {})) if last else {}
        is_from_start = first == 0 or last is not None
        result, total = before, len(ranges)
        result = replace(
            result, next_offsets={**result.next_offsets, self._log: bounds.next_offset}
        )
        for i in range(0, total, self._config.ranges_per_commit):
            chunk = ranges[i : i + self._config.ranges_per_commit]
            facts = self._work(chunk)
            if gap is not None:
                facts[self._tables[0].name].insert(0, gap)
                gap = None
            known = commit(self._lake, self._tables, facts, known, is_from_start=is_from_start)
            result = _added(result, facts)
            on_progress(
                Progress(
                    stage=f"ingest {self._log}",
                    done=i + len(chunk),
                    total=total,
                    rows=sum(result.rows.values()),
                )
            )
        state = {"read_at_ms": read_at_ms, "next_offset": bounds.next_offset}
        self._lake.write_state(self._tables[0], state)
        return result

    def _last(self, bounds: LogBounds) -> RangeFacts | None:
        """The last committed range; refuses tables of another store."""
        ranges = self._lake.ranges(self._tables[0])
        strangers = [one.source for one in ranges if one.source != bounds.store_id]
        if strangers:
            raise SourceError(
                source=self._place.name,
                reason=f"it is store {bounds.store_id}, and the tables in {self._lake.root} are of "
                f"store {strangers[0]}",
                remedy="Give each broker a folder of its own",
            )
        return ranges[-1] if ranges else None

    def _check_continued(
        self, reader: LogReader, bounds: LogBounds, last: RangeFacts | None, *, skip_expired: bool
    ) -> RangeFacts | None:
        """Make sure that the log goes on where the tables end; the gap that may be left out."""
        if last is None:
            return None
        if last.next > bounds.next_offset or not self._has_stamp(reader, bounds, last):
            raise SourceError(
                source=self._place.name,
                reason=f"its {self._log} is not the one that was ingested up to offset {last.next}: "
                "was it restored from a backup?",
                remedy="Ingest it into another folder",
            )
        if last.next >= bounds.first_offset:
            return None
        if not skip_expired:
            raise ExpiredRangeError(
                source=self._place.name,
                reason=f"offsets {last.next} to {bounds.first_offset} of {self._log} were not ingested "
                "before retention gave them up",
                remedy="Ingest more often; --skip-expired goes on behind them and notes the gap",
            )
        return RangeFacts(
            source=bounds.store_id,
            first=last.next,
            next=bounds.first_offset,
            rows=0,
            files=(),
            notes={"is_expired": True},
        )

    def _has_stamp(self, reader: LogReader, bounds: LogBounds, last: RangeFacts) -> bool:
        offset, stamp_crc = last.notes.get("last_frame", (-1, 0))
        if offset < bounds.first_offset:
            return True
        return reader.stamp_crc(int(offset)) == int(stamp_crc)

    def _work(self, ranges: Sequence[LogRange]) -> Written:
        """Let workers write these ranges."""
        pieces = [
            {
                "place": asdict(self._place),
                "tables": self._config.tables,
                "log": self._log,
                "first": one.first_offset,
                "after": one.next_offset,
            }
            for one in ranges
        ]
        return written(self._workers, _WORK, self._tables, pieces)


def _added(before: Ingested, found: Written) -> Ingested:
    rows = dict(before.rows)
    quarantined, ranges = before.quarantined, before.ranges
    for name, facts in found.items():
        rows[name] = rows.get(name, 0) + sum(one.rows for one in facts)
        for one in facts:
            quarantined += sum(after - first for runs in one.lost.values() for first, after in runs)
        ranges += len(facts) if TABLES[name] in (MESSAGES, ACTIONS) else 0
    return replace(before, rows=rows, quarantined=quarantined, ranges=ranges)
