"""What this user may not read or write: told as findings, with the GRANT that somebody else may give."""

from __future__ import annotations

import sqlalchemy as sa

from qmq_client.doctor.finding import Finding, Findings, found
from qmq_client.outbox.checking.column_drift import table_text
from qmq_client.outbox.checking.rights import (
    PRODUCER,
    ROLES,
    WATCHDOG,
    Rights,
    grants,
    user,
)
from qmq_client.outbox.table import Tables


def missing(connection: sa.Connection, right: str, read: str) -> Finding:
    """A check was left out; `right` is what stands between GRANT and TO."""
    return found("rights.missing", read, f"GRANT {right} TO {user(connection)}")


def roles(connection: sa.Connection, tables: Tables) -> Findings:
    """Which of our processes this user may be. Requires: the tables are there."""
    rights = Rights(connection, tables)
    lacking = {role: rights.lacking(role) for role in ROLES}
    if not any(lacking.values()):
        return
    outbox, lacks = tables.outbox, lacking[PRODUCER]
    # Who may not even read it is a consumer, whose affair it is not.
    is_told = lacks and lacking[WATCHDOG] and rights.has("SELECT", outbox)
    if is_told:
        names = ", ".join(right.name for right in lacks if not right.on.startswith("SEQUENCE"))
        read = f"{user(connection)} may not {names} on {table_text(connection, outbox)}"
        yield found("rights.write", read, "; ".join(grants(connection, lacks)))
    told = lacks if is_told else ()
    others = [right for role in ROLES for right in lacking[role] if right not in told]
    if others:
        enough = ", ".join(role.name for role in ROLES if not lacking[role]) or "none"
        little = ", ".join(role.name for role in ROLES if lacking[role])
        read = f"enough for: {enough}; not for: {little}"
        yield found("rights.role", read, "; ".join(grants(connection, others)))
