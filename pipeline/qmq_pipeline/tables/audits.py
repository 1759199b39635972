"""The columns of the audit's tables and of that which notes how far jobs have come."""

from __future__ import annotations

from typing import Final

from qmq_pipeline.tables.table import Column, Table

AUDIT_RUN: Final = Table(
    name="audit_run",
    layer="audit",
    version=2,
    key=("run",),
    columns=(
        Column("run", "text", "name of the run: its time"),
        Column("as_of", "time", "commits before this time are judged"),
        Column("first_at", "time", "… and after this one, from which on both sides are known"),
        Column("grace_s", "double", "how long a message may be on its way"),
        Column("committed", "long", "judged outbox rows"),
        Column("stored", "long", "judged messages"),
        Column("foreign_messages", "long", "stored messages of producers that no outbox knows"),
        Column(
            "expected",
            "long",
            "pairs of a message and a group it is for, for all messages",
        ),
        Column("delivered", "long", "of those, delivered at least once"),
        Column("settled", "long", "of those, done: acked, dead, skipped or filtered"),
        Column("lost", "long", "findings"),
        Column("ghost", "long", "findings"),
        Column("duplicate", "long", "findings"),
        Column("late", "long", "findings"),
        Column("altered", "long", "findings"),
        Column("skipped", "long", "findings"),
        Column("quarantined", "long", "quarantined sequences"),
        Column("verdict", "text", "clean, findings or not judged"),
        Column("coverage", "text", "what could not be judged, and why"),
    ),
)
AUDIT_FINDINGS: Final = Table(
    name="audit_findings",
    layer="audit",
    version=1,
    key=("run", "kind", "message_id", "subject", "consumer_group"),
    partitions=("run",),
    columns=(
        Column("kind", "text", "lost, ghost, duplicate, late, altered or skipped"),
        Column("message_id", "text", "32 hex digits"),
        Column("subject", "text", "the subject"),
        Column("consumer_group", "text", "the group, if only one is concerned"),
        Column("database", "text", "where its outbox row is or was"),
        Column("sequence", "long", "its place in the subject, if it is stored"),
        Column("at", "time", "time of the commit, or of the storing if no row is known"),
        Column("evidence", "text", "what was seen, in one sentence"),
        Column("run", "text", "name of the run"),
    ),
)
#: Up to where each job has come, as it noted at the end of its last run.
PROGRESS: Final = Table(
    name="progress",
    layer="jobs",
    version=1,
    key=("job",),
    partitions=("job",),
    columns=(
        Column("at", "time", "when it noted that"),
        Column("notes", "text", "JSON, for the job itself"),
        Column("job", "text", "ingest, archive, lifecycle or marts"),
    ),
)
