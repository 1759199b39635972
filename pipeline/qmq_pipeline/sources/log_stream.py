"""The streaming reader of the format `qmq`: offsets are places in the log.

::

    spark.readStream.format("qmq").option("broker_url", "http://broker:9470").load()

`maxBytesPerTrigger` bounds a micro-batch by bytes of log. With the trigger `availableNow` the query ends
where the log ended when it began. A checkpoint names its store, so no query continues on another log.
Spark honours such limits from 4.2 on; before, a batch holds all available data.

With `whole_parts` a batch begins where the *part* of the log begins in which the last batch ended.
So a writer whose tables have a folder for each part rewrites the open part, and never rewrites a
complete part: `qmq pipeline ingest` works this way, and so a repeated batch adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from qmq_pipeline.places.log import LogBounds
from qmq_pipeline.places.log_watch import LogWatch
from qmq_pipeline.places.options import LogOptions
from qmq_pipeline.sources.log_batches import (
    LogPartition,
    check_retained,
    chosen_offsets,
    log_of,
    plan,
    read_partition,
)
from qmq_pipeline.sources.positions import check_same_log, offset_of, position
from qmq_pipeline.sources.read_limits import (
    ReadAllAvailable,
    ReadMaxBytes,
    SupportsTriggerAvailableNow,
)

if TYPE_CHECKING:
    import pyarrow as pa


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the log from its beginning, or the offset in the options, and continues with new frames."""

    def __init__(self, options: LogOptions) -> None:
        self._options = options
        self._watch = LogWatch(options.place, log_of(options))
        #: The end of the log when an `availableNow` query began; None for any other query.
        self._target: LogBounds | None = None

    def initialOffset(self) -> dict[str, Any]:
        log = self._watch.reader
        first, _ = chosen_offsets(log, self._options)
        return position(log.store_id, first)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._look()

    def getDefaultReadLimit(self) -> Any:
        bytes_max = self._options.batch_bytes_max
        return ReadAllAvailable() if bytes_max is None else ReadMaxBytes(bytes_max)

    def latestOffset(
        self, start: dict[str, Any] | None = None, limit: Any = None
    ) -> dict[str, Any]:
        bounds = self._look()
        target = bounds if self._target is None else self._target
        last, end = target.last_frame, target.next_offset
        if start is None:  # Spark before 4.2 passes neither the position nor a limit
            return position(bounds.store_id, end, last)
        here = self._here(start, bounds)
        bytes_max = getattr(limit, "max_bytes", None)
        if bytes_max is not None and here + bytes_max < end:
            end = min(end, self._cut(here, here + int(bytes_max), bounds))
            last = self._watch.reader.last_frame(end, bounds)
        if end <= here:
            return start
        return position(bounds.store_id, end, last)

    def reportLatestOffset(self) -> dict[str, Any]:
        # For monitoring: in each micro-batch Spark asks for this right after the end of the batch.
        bounds = self._watch.known or self._watch.look()
        return position(bounds.store_id, bounds.next_offset, bounds.last_frame)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        # A batch is usually planned right after its end was requested, but not if it is repeated after a crash.
        bounds = self._watch.known or self._watch.look()
        after = offset_of(end, bounds.store_id, self._options)
        if after > bounds.next_offset:
            bounds = self._watch.look()
        first = self._here(start, bounds)
        if self._options.next_offset is not None:
            after = min(after, self._watch.reader.frame_from(self._options.next_offset, bounds))
        if first >= after:
            return []
        gap: list[InputPartition] = []
        if first < bounds.first_offset and self._options.passes_expired:
            log = self._watch.reader
            begin = bounds.first_offset
            gap = [LogPartition(self._options, log.format, first, begin, is_expired=True)]
            first = begin
        check_retained(first, bounds, self._options)
        if self._options.has_whole_parts:
            begin = max(first - first % self._part_bytes(), bounds.first_offset)
            first = self._watch.reader.frame_from(begin, bounds)
        return gap + plan(self._watch.reader, self._options, first, after)

    def _look(self) -> LogBounds:
        """The current readable range of the log."""
        bounds = self._watch.look()
        if not self._options.is_sealed:
            return bounds
        sealed = bounds.next_offset - bounds.next_offset % self._watch.reader.segment_bytes
        if sealed == bounds.next_offset:
            return bounds
        end = max(sealed, bounds.first_offset)
        return bounds._replace(
            next_offset=end, last_frame=self._watch.reader.last_frame(end, bounds)
        )

    def _here(self, start: dict[str, Any], bounds: LogBounds) -> int:
        """The offset of a position, after checking that the log is still the same."""
        here = offset_of(start, bounds.store_id, self._options)
        check_same_log(start, self._watch.reader, bounds, self._options.place.name)
        return here

    def _cut(self, here: int, wanted: int, bounds: LogBounds) -> int:
        """The end of a batch that must not reach beyond `wanted`; for writers of parts, the end of a part."""
        if self._options.has_whole_parts:
            part_bytes = self._part_bytes()
            wanted = max(wanted, here + part_bytes)
            wanted -= wanted % part_bytes
        return self._watch.reader.frame_from(wanted, bounds)

    def _part_bytes(self) -> int:
        return self._watch.reader.part_bytes(self._options.part_bytes_max)

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        return read_partition(partition) if isinstance(partition, LogPartition) else iter(())

    def stop(self) -> None:
        self._watch.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_target": self._target}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watch = LogWatch(self._options.place, log_of(self._options))
