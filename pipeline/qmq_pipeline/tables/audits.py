"""The columns of the audit's tables: one row for each run, and one for each finding."""

from __future__ import annotations

from typing import Final

from qmq_pipeline.tables.table import Column, Table

AUDIT_RUN: Final = Table(
    name="audit_run",
    layer="audit",
    version=1,
    key=("run",),
    columns=(
        Column("run", "text", "name of the run: its time"),
        Column("as_of", "time", "judged is what was committed before"),
        Column("first_at", "time", "… and after this: from here on both sides are known"),
        Column("grace_s", "double", "how long a message may be under way"),
        Column("committed", "long", "outbox rows judged"),
        Column("stored", "long", "messages judged"),
        Column("foreign_messages", "long", "stored messages of producers that no outbox knows"),
        Column(
            "expected",
            "long",
            "pairs of a message and a group that it is for, whenever it was stored",
        ),
        Column("delivered", "long", "of those, handed out at least once"),
        Column("settled", "long", "of those, done: acked, dead, skipped or filtered"),
        Column("lost", "long", "findings"),
        Column("ghost", "long", "findings"),
        Column("duplicate", "long", "findings"),
        Column("late", "long", "findings"),
        Column("altered", "long", "findings"),
        Column("quarantined", "long", "sequences that stand in quarantine"),
        Column("verdict", "text", "clean or findings"),
        Column("coverage", "text", "what could not be judged, and why"),
    ),
)
AUDIT_FINDINGS: Final = Table(
    name="audit_findings",
    layer="audit",
    version=1,
    key=("run", "kind", "message_id", "subject", "consumer_group"),
    columns=(
        Column("run", "text", "name of the run"),
        Column("kind", "text", "lost, ghost, duplicate, late or altered"),
        Column("message_id", "text", "32 hex digits"),
        Column("subject", "text", "the subject"),
        Column("consumer_group", "text", "the group, where only one is concerned"),
        Column("database", "text", "where its outbox row is or was"),
        Column("sequence", "long", "its place in the subject, when it is stored"),
        Column("at", "time", "committed, or stored when no row is known"),
        Column("evidence", "text", "what was seen, in one sentence"),
    ),
)
