"""Writes the micro-batches of `ingest`'s streams into the bronze tables; a repeated batch adds nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from qmq_pipeline.errors import IncompleteError
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.tables.schemas import LOG, OUTBOX, SPANS
from qmq_pipeline.tables.store import Tables
from qmq_pipeline.tables.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def tables_of(spark: SparkSession, config: PipelineConfig) -> Tables:
    """The tables that a configuration names."""
    return Tables(spark, config.tables, format_=config.table_format, namespace=config.namespace)


@dataclass(frozen=True, slots=True)
class BatchWriter:
    """Writes the micro-batches of one stream; Spark serializes it to where it is called."""

    config: PipelineConfig
    table: Table

    def __call__(self, batch: DataFrame, _: int) -> None:
        """Write one batch; may be repeated."""
        tables = tables_of(batch.sparkSession, self.config)
        if self.table is OUTBOX:
            tables.append(_changed(tables, batch), OUTBOX)
            return
        if self.table is LOG:
            open_part = tables.read(SPANS).selectExpr("MAX(part)").collect()[0][0]
            part = 0 if open_part is None else int(open_part)
            _write_log(tables, batch, part)
            _note_spans(tables, part)
            return
        tables.overwrite(batch, self.table)


def _changed(tables: Tables, scan: DataFrame) -> DataFrame:
    """The rows of a scan without rows that an earlier scan saw as sent, which no longer change."""
    known = tables.read(OUTBOX).where("state = 'sent'").select("database", "row_id", "message_id")
    sent = scan.where("state = 'sent'").join(
        known, ["database", "row_id", "message_id"], "left_anti"
    )
    return scan.where("state <> 'sent'").unionByName(sent)


def _write_log(tables: Tables, batch: DataFrame, part: int) -> None:
    """Write a batch that begins with the open part; messages in it that the broker has quarantined since are kept."""
    from pyspark import StorageLevel

    known = tables.read(LOG).where(f"kind = 'message' AND part = {part}")
    if not known.limit(1).collect():
        tables.overwrite(batch, LOG)
        return
    batch = batch.persist(StorageLevel.DISK_ONLY)  # otherwise the source would be read twice
    try:
        lost = batch.where(f"kind = 'lost' AND part = {part}")
        runs = lost.select("subject", "sequence", "count").collect()
        is_given_up = " OR ".join(
            f"(subject = '{row['subject']}' AND sequence >= {row['sequence']} "
            f"AND sequence < {row['sequence'] + row['count']})"
            for row in runs
        )
        every = batch.unionByName(known.where(is_given_up)) if runs else batch
        tables.overwrite(every, LOG)
    finally:
        batch.unpersist()


#: The span of each subject in each new or repeated part. A complete part has a sequence for each message or loss.
_SPANS: Final = """
SELECT subject, MIN(sequence) AS first_sequence, MAX(sequence + width) AS next_sequence,
       COUNT(*) FILTER (WHERE kind = 'message') AS messages,
       COALESCE(SUM(width) FILTER (WHERE kind = 'lost'), 0) AS lost,
       MIN(stored_at) AS first_at, MAX(stored_at) AS last_at, part
FROM (SELECT *, IF(kind = 'lost', count, 1) AS width FROM {log}
      WHERE kind IN ('message', 'lost') AND part >= {part})
GROUP BY part, subject
"""
#: P3: the sequences of a subject are contiguous, within a part and from one part to the next,
#: except where retention has deleted unread messages.
_HOLES: Final = """
SELECT subject, part, part_before, COALESCE(before, IF(is_from_start, 0, first_sequence)) AS wanted, first_sequence
FROM (
  SELECT *, LAG(next_sequence) OVER in_order AS before, COALESCE(LAG(part) OVER in_order, 0) AS part_before,
         (SELECT MIN(part) FROM {spans}) = 0 AS is_from_start
  FROM {spans} WINDOW in_order AS (PARTITION BY subject ORDER BY part)
) s WHERE part >= {part}
  AND (first_sequence + messages + lost < next_sequence
       OR COALESCE(before, IF(is_from_start, 0, first_sequence)) < first_sequence)
"""
#: The first gap that expired messages do not explain.
_UNEXPLAINED: Final = """
SELECT * FROM {holes} s WHERE NOT EXISTS (
  SELECT * FROM {log} e WHERE e.kind = 'expired' AND e.part BETWEEN s.part_before AND s.part)
ORDER BY part, subject LIMIT 1
"""
#: The first gap of a subject within a part.
_HOLE: Final = """
SELECT next AS first, sequence AS next FROM (
  SELECT sequence, LAG(sequence + IF(kind = 'lost', count, 1)) OVER (ORDER BY sequence) AS next
  FROM {log} WHERE kind IN ('message', 'lost') AND part = {part} AND subject = '{subject}'
) WHERE next < sequence ORDER BY sequence LIMIT 1
"""


def _note_spans(tables: Tables, part: int) -> None:
    """Count new messages by part and subject, from this part on; raises `IncompleteError` if a sequence is missing."""
    spark = tables.spark
    log = tables.read(LOG)
    # A row for each part and subject; counted in parallel, but too few rows for many partitions.
    fresh = spark.sql(_SPANS.format(log="{log}", part=part), log=log).coalesce(1).persist()
    try:
        known = tables.read(SPANS).where(f"part < {part}")
        asked = _HOLES.format(spans="{spans}", part=part)
        holes = spark.sql(asked, spans=known.unionByName(fresh))
        for row in (
            () if holes.isEmpty() else spark.sql(_UNEXPLAINED, holes=holes, log=log).collect()
        ):
            first, after = row["wanted"], row["first_sequence"]
            if first == after:
                within = _HOLE.format(log="{log}", part=row["part"], subject=row["subject"])
                ((first, after),) = spark.sql(within, log=log).collect()
            raise IncompleteError(
                subject=row["subject"], first_sequence=first, last_sequence=after - 1
            )
        tables.overwrite(fresh, SPANS)
    finally:
        fresh.unpersist()
