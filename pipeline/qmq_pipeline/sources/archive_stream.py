"""The streaming reader of the format `qmq` for an archive: it grows by whole segments.

::

    spark.readStream.format("qmq").option("path", "/archive").load()

Positions are those of the log that was archived, so a query may go on at the broker with the checkpoint
that it has from the archive. `maxBytesPerTrigger` bounds a micro-batch to the segments that fit, and to one
where none fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from qmq_pipeline.places.options import LogOptions
from qmq_pipeline.sources.archive_partitions import (
    ArchivePartition,
    archived_ranges,
    plan_archive,
    read_archive,
)
from qmq_pipeline.sources.positions import NO_STORE, offset_of, position
from qmq_pipeline.sources.read_limits import (
    ReadAllAvailable,
    ReadMaxBytes,
    SupportsTriggerAvailableNow,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from qmq_pipeline.tables.commits import RangeFacts


class ArchiveStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads an archive from its beginning, or from where the options say, and continues with what is archived."""

    def __init__(self, options: LogOptions) -> None:
        self._options = options
        #: The end of the archive when an `availableNow` query began; None for any other query.
        self._target: int | None = None

    def initialOffset(self) -> dict[str, Any]:
        ranges = archived_ranges(self._options)
        if not ranges:
            return position(NO_STORE, self._options.first_offset or 0)
        chosen = self._options.first_offset
        return position(ranges[0].source, ranges[0].first if chosen is None else chosen)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = _end_of(archived_ranges(self._options))

    def getDefaultReadLimit(self) -> Any:
        bytes_max = self._options.batch_bytes_max
        return ReadAllAvailable() if bytes_max is None else ReadMaxBytes(bytes_max)

    def latestOffset(
        self, start: dict[str, Any] | None = None, limit: Any = None
    ) -> dict[str, Any]:
        ranges = archived_ranges(self._options)
        if not ranges:
            return self.initialOffset()
        store_id, end = ranges[0].source, _end_of(ranges)
        end = end if self._target is None else self._target
        if start is None:  # Spark before 4.2 neither says where it stands nor asks for less
            return position(store_id, end)
        here = offset_of(start, store_id, self._options)
        bytes_max = getattr(limit, "max_bytes", None)
        if bytes_max is not None:
            ends = [one.next for one in ranges if here < one.next <= end]
            fitting = [one for one in ends if one <= here + int(bytes_max)]
            end = max(fitting, default=min(ends, default=end))
        return position(store_id, max(here, end))

    def reportLatestOffset(self) -> dict[str, Any]:
        ranges = archived_ranges(self._options)
        return position(ranges[0].source, _end_of(ranges)) if ranges else self.initialOffset()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        ranges = archived_ranges(self._options)
        if not ranges:
            return []
        first, after = (offset_of(one, ranges[0].source, self._options) for one in (start, end))
        if start == position(NO_STORE, 0) and self._options.first_offset is None:
            first = ranges[0].first  # which was not known when the query began
        if self._options.next_offset is not None:
            after = min(after, self._options.next_offset)
        return plan_archive(replace(self._options, first_offset=first, next_offset=after))

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        return read_archive(partition) if isinstance(partition, ArchivePartition) else iter(())


def _end_of(ranges: Sequence[RangeFacts]) -> int:
    return max((one.next for one in ranges), default=0)
