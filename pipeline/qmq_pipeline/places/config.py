"""What a job of the pipeline works on: one value, made by the command line or by a program.

Every job is a function of `(spark, config)`. Nothing is read from the environment below this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Final

from qmq_client.settings.sections import DatabaseSection
from qmq_pipeline.errors import OptionError
from qmq_pipeline.places.log import RANGE_BYTES
from qmq_pipeline.places.options import Place
from qmq_pipeline.places.outbox_options import OUTBOX_SAFETY_S
from qmq_pipeline.tables.merging import MERGE_COMMITS, MERGED_BYTES, MERGED_KEPT_S, MERGED_ROWS

#: Ranges that one job ingests before a commit: a crash repeats at most these.
RANGES_PER_COMMIT: Final = 64
#: About 600,000 messages of 200 bytes: seconds of work, and eight parts for a GiB of log.
WINDOW_BYTES: Final = 128 * 1024 * 1024
#: 10 MB of a worker's memory for each group with changes; 1.5 MB of file.
BLOCK_SEQUENCES: Final = 262_144


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """How messages are judged. Raises `OptionError` for a window without any time."""

    #: How long a message may be on its way before it counts as missing.
    grace_s: float = 60.0
    #: A message stored this long after its commit (or its due time, if delayed) is late.
    late_s: float = 60.0
    #: Whether every producer's outbox is among the databases: then a message without a row is a
    #: ghost, whoever sent it.
    is_closed_world: bool = False
    #: Whether accepted rows stay in every producer's and the watchdog's outbox until they are
    #: ingested: then a message of one of those producers without a row is a ghost. Also set by
    #: `keep_sent_s` of a configured database.
    are_rows_kept: bool = False
    #: Findings of one kind that are written out; all are counted.
    findings_max: int = 100_000
    #: Judge what was committed in this window; None for everything known.
    since_ms: int | None = None
    until_ms: int | None = None

    def __post_init__(self) -> None:
        if self.since_ms is None or self.until_ms is None or self.since_ms < self.until_ms:
            return
        raise OptionError(
            option="--until",
            value=f"{self.until_ms} ms, and --since is {self.since_ms} ms",
            allowed="a time after --since",
            remedy="Nothing could be judged between them.",
        )


#: Format of a listing → the package that writes it, installed by an extra.
_PACKAGES: Final = {"delta": "deltalake", "iceberg": "pyiceberg"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposeOptions:
    """How other programs are to find the tables.

    Raises `OptionError` for an unknown format, or one whose package is not installed.
    """

    #: "delta" or "iceberg".
    format: str
    #: Names of tables; empty for all.
    tables: tuple[str, ...] = ()
    #: For Iceberg: a catalog in pyiceberg's configuration; "" for its default one.
    catalog: str = ""
    #: … and properties missing from that configuration, by pyiceberg's names: "uri" and so on.
    catalog_properties: Mapping[str, str] = field(default_factory=dict)
    #: For Iceberg: the namespace in the catalog.
    namespace: str = "qmq"

    def __post_init__(self) -> None:
        package = _PACKAGES.get(self.format)
        if package is None:
            value, remedy = self.format, "Give one of them."
        elif find_spec(package) is None:
            value = f"{self.format}, and {package} is not installed"
            remedy = f'Install its extra: pip install "qmq[pipeline-{self.format}]".'
        else:
            return
        raise OptionError(
            option="format", value=value, allowed=" or ".join(_PACKAGES), remedy=remedy
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """One pipeline."""

    #: Folder of the tables: a path, or a URL of an object store.
    tables: str
    #: Where the logs are; None for a pipeline of outbox tables alone.
    place: Place | None = None
    #: Databases with an outbox, as `qmq.toml` has them.
    databases: tuple[DatabaseSection, ...] = ()
    partition_bytes: int = RANGE_BYTES
    ranges_per_commit: int = RANGES_PER_COMMIT
    #: An outbox row younger than this may still be preceded by a lower number that commits later;
    #: such rows are read again by the next run.
    outbox_safety_s: float = OUTBOX_SAFETY_S
    #: Number of buckets for the groups of the action log; one task folds one bucket. This and the
    #: next two decide how tables are cut: with other numbers they are rebuilt.
    fold_buckets: int = 4
    #: Sequences of a subject in one file of `deliveries`.
    fold_block_sequences: int = BLOCK_SEQUENCES
    #: Bytes of log in one part of `lifecycle`, which is rebuilt when a message of it changed.
    window_bytes: int = WINDOW_BYTES
    #: So many small commits that follow each other become one …
    merge_commits: int = MERGE_COMMITS
    #: … of so many bytes of log, which is not small any more.
    merged_bytes: int = MERGED_BYTES
    #: The same for scans of outboxes, in rows.
    merged_rows: int = MERGED_ROWS
    #: How long files stay that were merged.
    merged_kept_s: float = MERGED_KEPT_S
    audit: AuditOptions = field(default_factory=AuditOptions)
    #: What `run` exposes the tables as when it is done; None for nothing.
    expose: ExposeOptions | None = None

    def __post_init__(self) -> None:
        if not self.tables:
            raise OptionError(
                option="tables",
                value="empty",
                allowed="a folder",
                remedy="Say where the tables are to be kept.",
            )
