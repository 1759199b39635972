"""The doctor's checks of the outbox tables and of the rows that wait in them."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from qmq_client.doctor.drift import find_drift
from qmq_client.doctor.finding import Findings, Thresholds, found
from qmq_client.outbox.committed.settling import UNDELETED
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.table import LIVE, PARKED, SENT, Tables

#: Words in a difference → the check it belongs to; the first match counts.
_KINDS: Final = (
    ("was not checked", "rights.missing"),
    ("is of engine", "table.engine"),
    ("is UNLOGGED", "table.unlogged"),
    ("binlog_format", "mysql.binlog_format"),
    ("has the collation", "column.collation"),
    ("has no index", "index.missing"),
    ("was never finished", "index.missing"),
    ("primary key", "table.key"),
    ("twice", "table.key"),
    ("is missing", "schema.missing"),
    ("revision", "schema.missing"),
    ("older than", "schema.missing"),
)
#: Rows that are counted and grouped; above this the count is "at least".
_ROWS_MAX: Final = 10_000
_GROUPS_MAX: Final = 5
_ERROR_CHARACTERS: Final = 120


def drifted(connection: sa.Connection, tables: Tables) -> Findings:
    """The differences that `qmq db check` reports, sorted by the promise they break."""
    for drift in find_drift(connection, tables):
        kinds = (id_ for word, id_ in _KINDS if word in drift.fault)
        yield found(next(kinds, "column.type"), drift.fault, drift.remedy)


def waiting(connection: sa.Connection, tables: Tables, thresholds: Thresholds) -> Findings:
    """Rows that are parked, overdue, or waiting too long. Requires: the tables exist."""
    yield from _parked(connection, tables.outbox)
    yield from _undeleted(connection, tables.outbox)
    columns = tables.outbox.c
    now_ms = sa.literal_column(dialect_of(connection.engine).now_ms, sa.BigInteger())
    overdue = sa.select(columns.due_at_ms).where(
        columns.state == LIVE, columns.due_at_ms < now_ms - round(thresholds.overdue_s_max * 1000)
    )
    # The index on state and due time serves both queries, with any number of rows.
    first_ms = connection.scalar(overdue.order_by(columns.due_at_ms).limit(1))
    if first_ms is not None:
        count = _count(connection, overdue)
        late_s = (connection.scalar(sa.select(now_ms)) - first_ms) / 1000
        yield found(
            "rows.overdue", f"{count} rows, the first due {late_s:,.0f} s ago", "qmq watchdog run"
        )
        return
    yield from _unsent(connection, tables.outbox, now_ms, thresholds)


def _parked(connection: sa.Connection, outbox: sa.Table) -> Findings:
    columns = outbox.c
    error = sa.func.substr(sa.func.coalesce(columns.last_error, ""), 1, _ERROR_CHARACTERS)
    some = (
        sa.select(columns.subject, error.label("error"))
        .where(columns.state == PARKED)
        .limit(_ROWS_MAX)
        .subquery()
    )
    count = sa.func.count().label("count")
    groups = connection.execute(
        sa.select(some.c.subject, some.c.error, count)
        .group_by(some.c.subject, some.c.error)
        .order_by(count.desc())
        .limit(_GROUPS_MAX + 1)
    ).all()
    if not groups:
        return
    shown = [f"{row[2]} of {row.subject} ({row.error or 'no error recorded'})" for row in groups]
    more = " …" if len(shown) > _GROUPS_MAX else ""
    read = "; ".join(shown[:_GROUPS_MAX]) + more
    yield found("rows.parked", read, "qmq outbox retry --all")


def _undeleted(connection: sa.Connection, outbox: sa.Table) -> Findings:
    columns = outbox.c
    some = (
        sa.select(columns.last_error)
        .where(columns.state == SENT)
        .order_by(columns.due_at_ms)
        .limit(_ROWS_MAX)
        .subquery()
    )
    kept = sa.select(some.c.last_error).where(some.c.last_error.startswith(UNDELETED))
    error = connection.scalar(kept.limit(1))
    if error is not None:
        reason = error.removeprefix(f"{UNDELETED}: ")[:_ERROR_CHARACTERS]
        read = f"{_count(connection, kept)} rows: {reason}"
        fix = "remove the trigger, rule, policy or foreign key; `qmq outbox list --state sent`"
        yield found("rows.undeleted", read, fix)


def _unsent(
    connection: sa.Connection,
    outbox: sa.Table,
    now_ms: sa.ColumnElement[int],
    thresholds: Thresholds,
) -> Findings:
    columns = outbox.c
    some = (
        sa.select(columns.created_at_ms, columns.attempts, columns.last_error)
        .where(columns.state == LIVE)
        .order_by(columns.due_at_ms)
        .limit(_ROWS_MAX)
        .subquery()
    )
    age_s = (now_ms - some.c.created_at_ms) / 1000
    oldest = connection.execute(
        sa.select(age_s, some.c.attempts, some.c.last_error)
        .where(some.c.created_at_ms < now_ms - round(thresholds.unsent_s_max * 1000))
        .order_by(some.c.created_at_ms)
        .limit(1)
    ).first()
    if oldest is not None:
        error = (oldest[2] or "no error recorded")[:_ERROR_CHARACTERS]
        read = f"the oldest for {oldest[0]:,.0f} s, after {oldest[1]} attempts: {error}"
        yield found("rows.unsent", read, "qmq outbox list")


def _count(connection: sa.Connection, rows: sa.Select[tuple[int]]) -> str:
    some = rows.limit(_ROWS_MAX).subquery()
    count = connection.scalar(sa.select(sa.func.count()).select_from(some)) or 0
    return f"at least {count:,}" if count == _ROWS_MAX else f"{count:,}"
