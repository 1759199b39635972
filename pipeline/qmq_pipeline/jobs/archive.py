"""`qmq pipeline archive`: sealed segments of the logs as Parquet, verified before retention may delete them.

An archive is a folder of tables like any other: other jobs read it by `--tables`, and `spark.read.parquet` does.
The streams of `ingest` write it, but only full segments. Then each row is read back, encoded again as its
producer would, and compared with the producer's checksum; the files are synced; and the broker gets
the offsets that the archive has. Retention waits for it from the first run on (`keeping.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from qmq_client.wire.record import BodyKind, Record, encode_record, record_crc
from qmq_pipeline.errors import DamagedRangeError
from qmq_pipeline.jobs.ingest import ARCHIVE, Streams, is_new, lost_sequences
from qmq_pipeline.jobs.keeping import Keeping
from qmq_pipeline.jobs.progress import OnProgress, Progress, no_progress
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.log import ACTION_LOG, COMMIT_LOG
from qmq_pipeline.places.options import Place, parse_log_options
from qmq_pipeline.places.places import open_log, with_token
from qmq_pipeline.sources.positions import check_same_log, offset_of
from qmq_pipeline.tables.schemas import LOG
from qmq_pipeline.tables.sequences import Runs
from qmq_pipeline.tables.store import Tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOGS: Final[tuple[str, ...]] = (COMMIT_LOG, ACTION_LOG)
NO_BROKER: Final = "no broker was named (--broker URL)"
_TIMES: Final = ("born_at", "due_at", "expires_at")
_COLUMNS: Final = (
    "subject",
    "message_id",
    "record_crc",
    "found_crc",
    "key",
    "tags",
    "headers",
    "body_kind",
    "body",
    *(f"unix_millis({name}) AS {name}" for name in _TIMES),
)
#: The result of verifying a batch of rows: a text for the first row that differs from its producer's record.
_VERIFIED: Final = "verified BIGINT, not_records BIGINT, fault STRING"
_VERIFIED_SCHEMA: Final = pa.schema(
    [("verified", pa.int64()), ("not_records", pa.int64()), ("fault", pa.string())]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Archived:
    """The rows that one run added, and the offsets that the archive has."""

    messages: int
    #: Rows that have their producer's checksum after encoding.
    verified: int
    #: Rows whose bytes were never a record; stored unchanged.
    not_records: int
    #: Subject → runs of sequences that the broker has in quarantine, so that the archive lacks them.
    quarantined: Runs
    #: Log → offset below which the archive is complete.
    next_offsets: dict[str, int]
    #: The name under which the broker waits for this archive; None if it does not wait …
    keeper: str | None
    #: … and the reason why not.
    not_waited_for: str


def archive(
    spark: SparkSession,
    config: PipelineConfig,
    *,
    keeping: Keeping | None = None,
    on_progress: OnProgress = no_progress,
) -> Archived:
    """Archive every sealed segment that the folder `config.tables` does not have yet.

    `keeping`: the broker whose retention must wait for this archive; None for the broker that
    `config` reads from, if any. Raises a `PipelineError`, or an error of Spark that `explain`
    understands.
    """
    streams = Streams(spark, replace(config, databases=()), job=ARCHIVE)
    tables = streams.tables
    noted = streams.prepared()
    with tables.writing("bronze"):
        assert config.place is not None
        place = with_token(config.place, os.environ)
        keeper = _keeping(keeping, place)
        kept = {log: noted[log] for log in _LOGS if log in noted}
        is_waited_for = keeper.report(_store_id(place), kept)
        for log in _LOGS:
            streams.run(log, is_sealed=True)
            on_progress(Progress(stage=f"archive {log}", done=1, total=2, rows=0))
        # No time is recorded up to which the log is complete, because the unsealed part is missing.
        streams.ends["read_at_ms"] = 0
        new = is_new(COMMIT_LOG, noted)
        verified, not_records = verify(tables, new)
        sync_files(tables)
        for log, position in streams.positions.items():
            if keeper.place is not None and keeper.place != config.place:
                check_same(keeper.place, log, position)
        done = streams.done(noted)
        keeper.report(streams.ends.get("store_id", ""), done.next_offsets)
    return Archived(
        messages=sum(done.rows.get(kind, 0) for kind in ("messages", "scheduled")),
        verified=verified,
        not_records=not_records,
        quarantined=lost_sequences(tables, new),
        next_offsets=done.next_offsets,
        keeper=keeper.name if is_waited_for else None,
        not_waited_for=keeper.not_waited_for,
    )


def _keeping(given: Keeping | None, place: Place) -> Keeping:
    """The broker to report to, with the token of the environment, like the source."""
    if given is None:
        given = Keeping(place=place if place.broker_url else None)
    if given.place is None:
        return replace(given, not_waited_for=given.not_waited_for or NO_BROKER)
    return replace(given, place=with_token(given.place, os.environ))


def _store_id(place: Place) -> str:
    reader = open_log(place, COMMIT_LOG)
    try:
        return reader.store_id
    finally:
        reader.close()


def check_same(place: Place, log: str, position: Mapping[str, Any]) -> None:
    """Raise `SourceError` unless the broker that retains for the archive has the log of this position."""
    reader = open_log(place, log)
    try:
        bounds = reader.bounds()
        options = replace(parse_log_options({"path": "-"}), place=place)
        offset_of(dict(position), bounds.store_id, options)
        check_same_log(dict(position), reader, bounds, place.name)
    finally:
        reader.close()


def verify(tables: Tables, condition: str) -> tuple[int, int]:
    """Read rows back and compare each with its producer's checksum; returns how many were compared,
    and how many are not records.

    Raises `DamagedRangeError` for a row that differs from its producer's record.
    """
    rows = tables.read(LOG).where(f"kind IN ('message', 'scheduled') AND {condition}")
    counted = rows.selectExpr(*_COLUMNS).mapInArrow(_verified, _VERIFIED)
    (row,) = counted.selectExpr("SUM(verified)", "SUM(not_records)", "MIN(fault)").collect()
    if row[2] is not None:
        raise DamagedRangeError(
            source=tables.path(LOG),
            reason=row[2],
            remedy="The segment stays in the log. `qmq pipeline audit` names each such message; check proxies between its producer and the broker, and the archive's disk",
        )
    return int(row[0] or 0), int(row[1] or 0)


def _verified(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        strange, fault = 0, None
        for row in batch.to_pylist():
            strange += row["body_kind"] < 0
            if row["body_kind"] >= 0 and (found := _crc(row)) != row["record_crc"]:
                fault = fault or (
                    f"message {row['message_id']} of {row['subject']} has bytes with the checksum {found:08x}, and "
                    f"its producer's is {row['record_crc']:08x}"
                )
        counts = {"verified": [batch.num_rows], "not_records": [strange], "fault": [fault]}
        yield pa.RecordBatch.from_pydict(counts, schema=_VERIFIED_SCHEMA)


def _crc(row: Mapping[str, Any]) -> int:
    """The checksum of a row as its producer would encode it. Times are milliseconds."""
    record = Record(
        message_id=bytes.fromhex(row["message_id"]),
        subject=row["subject"],
        body=row["body"],
        body_kind=BodyKind(row["body_kind"]),
        key=row["key"],
        tags=tuple(row["tags"]),
        headers=tuple(row["headers"]),
        born_at_ms=row["born_at"],
        due_at_ms=row["due_at"],
        expires_at_ms=row["expires_at"],
    )
    return record_crc(encode_record(record))


def sync_files(tables: Tables) -> None:
    """Sync all files on a local disk, before the broker may delete the originals."""
    if "://" in tables.root:
        return
    for folder, _, names in os.walk(tables.root):
        for path in (folder, *(f"{folder}/{name}" for name in names)):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
