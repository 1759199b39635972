"""The configuration of a job of the pipeline, made by the command line or by a program.

Every job is a function of `(spark, config)`. Nothing is read from the environment below this.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from qmq_client.settings.sections import DatabaseSection
from qmq_pipeline.errors import OptionError
from qmq_pipeline.places.options import PART_BYTES, Place
from qmq_pipeline.places.outbox_options import OUTBOX_SAFETY_S
from qmq_pipeline.tables.store import FORMATS, ICEBERG, PARQUET


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """The rules of the audit. Raises `OptionError` for an empty window."""

    #: Time after the commit before a missing message counts as lost.
    grace_s: float = 60.0
    #: A message stored this long after its commit (or its due time, if delayed) is late.
    late_s: float = 60.0
    #: Whether every producer's outbox is among the databases: then a message without a row is a
    #: ghost, no matter who sent it.
    is_closed_world: bool = False
    #: Whether accepted rows stay in every producer's and the watchdog's outbox until they are
    #: ingested: then a message of one of those producers without a row is a ghost. Also set by
    #: `keep_sent_s` of a configured database.
    are_rows_kept: bool = False
    #: Most findings of one kind that are written; all are counted.
    findings_max: int = 100_000
    #: Judge messages committed in this window; None for all.
    since_ms: int | None = None
    until_ms: int | None = None

    def __post_init__(self) -> None:
        if self.since_ms is None or self.until_ms is None or self.since_ms < self.until_ms:
            return
        raise OptionError(
            option="--until",
            value=f"{self.until_ms} ms, and --since is {self.since_ms} ms",
            allowed="a time after --since",
            remedy="Give a later --until, or an earlier --since.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """Configuration of one pipeline."""

    #: Folder of the tables: a path, or a URL of an object store.
    tables: str
    #: Place of the logs; None for a pipeline of outboxes only.
    place: Place | None = None
    #: Databases with an outbox, as in `qmq.toml`.
    databases: tuple[DatabaseSection, ...] = ()
    #: Format of the tables: parquet, or delta or iceberg if the session of Spark has a connector for it.
    table_format: str = PARQUET
    #: Namespace for the tables in the session's catalog, like `lake.qmq`; needed for Iceberg.
    namespace: str = ""
    #: Bytes of log in one part of the tables at most; with another value the folder must be rebuilt.
    part_bytes: int = PART_BYTES
    #: An outbox row younger than this may still be preceded by a lower number that commits later;
    #: such rows are read again by the next run.
    outbox_safety_s: float = OUTBOX_SAFETY_S
    audit: AuditOptions = field(default_factory=AuditOptions)

    def __post_init__(self) -> None:
        if not self.tables:
            raise OptionError(
                option="tables",
                value="empty",
                allowed="a folder",
                remedy="Name the folder for the tables.",
            )
        if self.table_format not in FORMATS:
            raise OptionError(
                option="--table-format",
                value=self.table_format,
                allowed=", ".join(FORMATS),
                remedy="Choose one of these.",
            )
        if self.table_format == ICEBERG and not self.namespace:
            raise OptionError(
                option="--namespace",
                value="not given, and --table-format is iceberg",
                allowed="a catalog and a namespace of the session, like lake.qmq",
                remedy="Give it: Iceberg finds its tables by their catalog.",
            )
