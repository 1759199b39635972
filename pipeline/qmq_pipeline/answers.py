"""Texts of a job's result, in a few lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from qmq_pipeline.tables.sequences import named

if TYPE_CHECKING:
    from qmq_pipeline.jobs.audit import AuditResult
    from qmq_pipeline.jobs.ingest import Ingested
    from qmq_pipeline.places.config import PipelineConfig

#: Nouns for the rows of tables with unclear names.
_NOUNS: Final = {
    "outbox": "outbox rows",
    "scheduled": "scheduled messages",
    "cancelled": "cancellations",
    "copy": "copies",
    "lost": "ranges in quarantine",
    "expired": "ranges that expired unread",
}
#: More databases are counted, not named.
_NAMED_MAX: Final = 3


def ingested_text(done: Ingested, config: PipelineConfig) -> str:
    """New rows by table; without any, the places that were read."""
    rows = {**done.rows, "outbox": sum(done.outbox.values())}
    parts = [f"{count:,} {_NOUNS.get(name, name)}" for name, count in rows.items() if count]
    text = f"ingested {', '.join(parts)}" if parts else f"nothing new in {_looked_at(config)}"
    return text + (f"; in quarantine: {named(done.quarantined)}" if done.quarantined else "")


def audit_text(done: AuditResult) -> str:
    """The verdict in a few lines."""
    counts = ", ".join(f"{count:,} {kind}" for kind, count in done.findings.items())
    verdict = done.verdict.upper()
    if done.is_clean and done.coverage:
        verdict += ", as far as it could be judged"
    judged = f"{done.committed:,} committed, {done.stored:,} stored"
    lines = [
        f"{verdict}: {counts}",
        f"  judged as of {done.as_of.isoformat() if done.is_judged else 'no time'}: {judged}",
        f"  pairs of a message and a group, in all tables: {done.delivered:,} of {done.expected:,} delivered, {done.settled:,} settled",
        *_foreign(done),
        *(f"  not judged: {reason}" for reason in done.coverage),
    ]
    return "\n".join(lines)


def _foreign(done: AuditResult) -> list[str]:
    if not done.foreign_messages:
        return []
    return [
        f"  of those stored, {done.foreign_messages:,} are of producers that no outbox here knows: whether one of "
        "theirs was lost is unknown (--closed-world makes them ghosts)"
    ]


def _looked_at(config: PipelineConfig) -> str:
    logs = [] if config.place is None else [f"the logs of {config.place.name}"]
    names = [one.name for one in config.databases]
    outboxes = f"the outbox of {' and of '.join(names)}"
    if len(names) > _NAMED_MAX:
        outboxes = f"{len(names):,} outboxes"
    return " and ".join([*logs, *([outboxes] if names else [])])
