"""`qmq pipeline ingest`: the logs into bronze tables, continuing where the last run ended.

The driver cuts what is new into ranges, workers write them, and the driver commits some dozens at a
time. The commits are the only state. They say up to where each log was read, and the checksum of
the last frame there, so a log that was restored to an older state is not mistaken for the same log.
At its end a run merges small files that short runs have left; see `merge.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.wire.frame import FrameKind
from qmq_pipeline.errors import ExpiredRangeError, LakeError, SourceError
from qmq_pipeline.jobs.log_tables import Written, checked_place, commit, prepared, written
from qmq_pipeline.jobs.merge import merge
from qmq_pipeline.jobs.progress import OnProgress, Progress, nobody
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.log import ACTION_LOG, COMMIT_LOG, LogBounds
from qmq_pipeline.places.log_watch import LogWatch
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.commits import ARCHIVED, EXPIRED, RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.log_end import LogEnd
from qmq_pipeline.tables.schemas import ACTIONS, MESSAGES, TABLES
from qmq_pipeline.tables.sequences import Runs, joined
from qmq_pipeline.tables.table import Table
from qmq_pipeline.work.ranges import TABLES_OF

if TYPE_CHECKING:
    from qmq_pipeline.sources.tasks import Workers

_WORK: Final = "qmq_pipeline.work.ranges.ingest_piece"
_LOGS: Final = (COMMIT_LOG, ACTION_LOG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingested:
    """What one run added."""

    rows: dict[str, int]
    #: Log → offset where the next run continues.
    next_offsets: dict[str, int]
    #: Subject → runs of sequences in the ranges of this run that the broker has in quarantine.
    quarantined: Runs
    ranges: int


def ingest(
    workers: Workers,
    config: PipelineConfig,
    *,
    watches: Mapping[str, LogWatch] | None = None,
    skip_expired: bool = False,
    on_progress: OnProgress = nobody,
) -> Ingested:
    """Bring messages, delayed messages and actions up to the durable end of the logs.

    `workers`: a session, or `LocalWorkers`. `watches`: both logs, for callers that check them
    repeatedly. `skip_expired`: continue behind what retention has deleted and note the gap, instead
    of failing. Raises a `PipelineError`; what was committed before it stays.
    """
    place, lake = prepared(config, "read")
    done = Ingested(rows={}, next_offsets={}, quarantined={}, ranges=0)
    with lake.writing(), ExitStack() as own:
        if watches is None:
            watches = own.enter_context(watched_logs(place))
        for run in [_Run(workers, config, place, lake, watches[log], log) for log in _LOGS]:
            done = run.go(done, skip_expired=skip_expired, on_progress=on_progress)
    return done


def check(config: PipelineConfig) -> None:
    """Refuse what `ingest` refuses before it reads, for callers that have something to write before it.

    Creates nothing. Raises a `PipelineError`.
    """
    checked_place(config, "read")
    lake = Lake(config.tables)
    _refuse_archive(lake, LogEnd(lake, TABLES_OF[COMMIT_LOG][0]).last())


def _refuse_archive(lake: Lake, last: RangeFacts | None) -> None:
    if last is not None and last.notes.get(ARCHIVED):
        raise LakeError(
            path=lake.root,
            reason="it is an archive, in which each row is verified, and whole segments follow each other",
            remedy="Ingest into a folder of its own; the other jobs work on the archive as it is",
        )


@contextmanager
def watched_logs(place: Place) -> Iterator[dict[str, LogWatch]]:
    """Both logs at a place, as callers of repeated `ingest` pass them."""
    with ExitStack() as every:
        yield {log: every.enter_context(LogWatch(place, log)) for log in _LOGS}


class _Run:
    """One log in one run."""

    def __init__(
        self,
        workers: Workers,
        config: PipelineConfig,
        place: Place,
        lake: Lake,
        watch: LogWatch,
        log: str,
    ) -> None:
        self._workers = workers
        self._config = config
        self._place = place
        self._lake = lake
        self._watch = watch
        self._log = log
        self._tables: Sequence[Table] = TABLES_OF[log]
        self._ends = [LogEnd(lake, table) for table in self._tables]
        self._last = self._ends[0].last()
        _refuse_archive(lake, self._last)

    def go(self, before: Ingested, *, skip_expired: bool, on_progress: OnProgress) -> Ingested:
        last = self._last
        for end in self._ends:
            end.clear_behind(last)
        read_at_ms = SYSTEM_CLOCK.now_ms()
        bounds = self._continued_bounds(last)
        gap = self._gap(bounds, last, skip_expired=skip_expired)
        first = bounds.first_offset if last is None or gap is not None else last.next
        reader = self._watch.reader
        ranges = reader.ranges(first, bounds.next_offset, self._config.partition_bytes)
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
            self._watch.last_frame = _last_frame(facts[self._tables[0].name][-1])
            result = _added(result, facts)
            on_progress(
                Progress(
                    stage=f"ingest {self._log}",
                    done=i + len(chunk),
                    total=total,
                    rows=sum(result.rows.values()),
                    added={name: sum(one.rows for one in some) for name, some in facts.items()},
                    quarantined=_lost(facts),
                )
            )
        state = {"read_at_ms": read_at_ms, "next_offset": bounds.next_offset}
        self._lake.write_state(self._tables[0], state)
        for table in self._tables:
            merge(self._workers, self._config, self._lake, table)
        return result

    def _continued_bounds(self, last: RangeFacts | None) -> LogBounds:
        """The extent of the log; refuses a log other than that of the tables."""
        bounds = self._watch.look()
        if last is None:
            return bounds
        if last.source != bounds.store_id:
            raise SourceError(
                source=self._place.name,
                reason=f"it is store {bounds.store_id}, and the tables in {self._lake.root} are of "
                f"store {last.source}",
                remedy="Give each broker a folder of its own",
            )
        self._watch.last_frame = _last_frame(last)
        if not self._has_stamp(
            bounds, last
        ):  # or retention has passed that frame since it was seen
            bounds = self._watch.look_anew()
        is_same = self._has_stamp(bounds, last) or self._is_in_quarantine(last)
        if last.next > bounds.next_offset or not is_same:
            raise SourceError(
                source=self._place.name,
                reason=f"its {self._log} is not the one that was ingested up to offset {last.next}: "
                "was it restored from a backup?",
                remedy="Ingest it into another folder",
            )
        return bounds

    def _has_stamp(self, bounds: LogBounds, last: RangeFacts) -> bool:
        offset, stamp_crc = _last_frame(last) or (-1, 0)
        if offset < bounds.first_offset:
            return True
        return self._watch.reader.stamp_crc(offset) == stamp_crc

    def _is_in_quarantine(self, last: RangeFacts) -> bool:
        """Whether the frame that was read last was damaged since, and the broker has given it up."""
        offset, _ = _last_frame(last) or (-1, 0)
        try:
            return any(
                frame.header.kind is FrameKind.LOST
                and frame.offset <= offset < frame.offset + frame.header.frame_bytes
                for frame in self._watch.reader.frames(LogRange(last.first, last.next))
            )
        except SourceError:  # it is another log, whose frames do not begin or end there
            return False

    def _gap(
        self, bounds: LogBounds, last: RangeFacts | None, *, skip_expired: bool
    ) -> RangeFacts | None:
        """What retention deleted before it was ingested, if that may be skipped."""
        if last is None or last.next >= bounds.first_offset:
            return None
        if not skip_expired:
            raise ExpiredRangeError(
                source=self._place.name,
                reason=f"offsets {last.next} to {bounds.first_offset} of {self._log} were not ingested "
                "before retention gave them up",
                remedy="Ingest more often; --skip-expired continues behind them and notes the gap",
            )
        return RangeFacts(
            source=bounds.store_id,
            first=last.next,
            next=bounds.first_offset,
            rows=0,
            files=(),
            notes={EXPIRED: True},
        )

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
    rows, ranges = dict(before.rows), before.ranges
    for name, facts in found.items():
        rows[name] = rows.get(name, 0) + sum(one.rows for one in facts)
        ranges += len(facts) if TABLES[name] in (MESSAGES, ACTIONS) else 0
    return replace(
        before, rows=rows, quarantined=joined([before.quarantined, _lost(found)]), ranges=ranges
    )


def _last_frame(facts: RangeFacts) -> tuple[int, int] | None:
    """Offset and checksum of the last frame of a range."""
    offset, stamp_crc = facts.notes.get("last_frame", (-1, 0))
    return None if offset < 0 else (int(offset), int(stamp_crc))


def _lost(found: Written) -> Runs:
    return joined(one.lost for facts in found.values() for one in facts)
