"""Outboxes and logs into bronze tables, in the order in which an audit can believe them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qmq_pipeline.jobs.ingest import Ingested, check, ingest
from qmq_pipeline.jobs.ingest_outbox import ingest_outbox
from qmq_pipeline.jobs.progress import OnProgress, nobody
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.log_watch import LogWatch

if TYPE_CHECKING:
    from qmq_pipeline.sources.tasks import Workers


def ingest_both(
    workers: Workers,
    config: PipelineConfig,
    *,
    watches: Mapping[str, LogWatch] | None = None,
    skip_expired: bool = False,
    on_progress: OnProgress = nobody,
) -> tuple[dict[str, int], Ingested]:
    """Rows of each database, and what came from the logs; see `ingest_outbox` and `ingest`.

    Without a place, `config` brings in outboxes alone; without databases, logs alone. A log that cannot be
    ingested is refused before rows of outboxes are written; whoever has `watches` has checked it.
    """
    done = Ingested(rows={}, next_offsets={}, quarantined={}, ranges=0)
    has_log = config.place is not None or not config.databases
    if has_log and watches is None:
        check(config)
    # Outboxes first: what they show as sent is then in the log when it is read.
    outbox = ingest_outbox(workers, config, on_progress=on_progress)
    if has_log:
        done = ingest(
            workers, config, watches=watches, skip_expired=skip_expired, on_progress=on_progress
        )
    return outbox, done
