"""What a job's result is told as, in a few lines for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from qmq_pipeline.tables.sequences import named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qmq_pipeline.jobs.audit import AuditResult
    from qmq_pipeline.jobs.expose import Exposed
    from qmq_pipeline.places.config import PipelineConfig
    from qmq_pipeline.tables.sequences import Runs

#: Tables whose names do not say what their rows are.
_NOUNS: Final = {"outbox": "outbox rows", "scheduled": "scheduled messages"}
#: More databases are counted, not named.
_NAMED_MAX: Final = 3


def ingested_text(
    rows: Mapping[str, int], config: PipelineConfig, *, quarantined: Runs | None = None
) -> str:
    """What came in, without the tables that nothing came into; if nothing did, where that was looked for."""
    parts = [f"{count:,} {_NOUNS.get(name, name)}" for name, count in rows.items() if count]
    text = f"ingested {', '.join(parts)}" if parts else f"nothing new in {_looked_at(config)}"
    return text + (f"; in quarantine: {named(quarantined)}" if quarantined else "")


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
        f"  pairs of a message and a group, of all in the tables: {done.delivered:,} of {done.expected:,} delivered, {done.settled:,} settled",
        *(f"  not judged: {reason}" for reason in done.coverage),
    ]
    return "\n".join(lines)


def exposed_text(done: Exposed, format_: str | None) -> str:
    """How many files the listing of the tables gained and lost."""
    added = sum(one.added for one in done.tables.values())
    removed = sum(one.removed for one in done.tables.values())
    rows = sum(one.rows for one in done.tables.values())
    return (
        f"exposed {len(done.tables)} tables as {format_}, {rows:,} rows: "
        f"{added:,} files added, {removed:,} removed"
    )


def _looked_at(config: PipelineConfig) -> str:
    logs = [] if config.place is None else [f"the logs of {config.place.name}"]
    names = [one.name for one in config.databases]
    outboxes = f"the outbox of {' and of '.join(names)}"
    if len(names) > _NAMED_MAX:
        outboxes = f"{len(names):,} outboxes"
    return " and ".join([*logs, *([outboxes] if names else [])])
