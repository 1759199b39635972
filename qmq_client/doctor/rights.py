"""Missing rights of this user: findings with the GRANT that an administrator can issue."""

from __future__ import annotations

import sqlalchemy as sa

from qmq_client.doctor.finding import Finding, Findings, found
from qmq_client.outbox.checking.rights import (
    PRODUCER,
    ROLES,
    WATCHDOG,
    Rights,
    grants,
    user,
)
from qmq_client.outbox.database.table_names import table_text
from qmq_client.outbox.table import Tables


def missing(connection: sa.Connection, right: str, read: str) -> Finding:
    """A check that was left out; `right` is the text between GRANT and TO."""
    return found("rights.missing", read, f"GRANT {right} TO {user(connection)}")


def roles(connection: sa.Connection, tables: Tables) -> Findings:
    """Check which of QMQ's processes this user can run. Requires: the tables exist."""
    rights = Rights(connection)
    lacking = {role: rights.lacking(role, tables) for role in ROLES}
    if not any(lacking.values()):
        return
    outbox, lacks = tables.outbox, lacking[PRODUCER]
    # A user who may not even read the outbox belongs to a consumer, which does not use the outbox.
    is_listed = lacks and lacking[WATCHDOG] and rights.has("SELECT", outbox)
    if is_listed:
        names = ", ".join(right.name for right in lacks if not right.on.startswith("SEQUENCE"))
        read = f"{user(connection)} may not {names} on {table_text(connection, outbox)}"
        yield found("rights.write", read, "; ".join(grants(connection, lacks)))
    told = lacks if is_listed else ()
    others = [right for role in ROLES for right in lacking[role] if right not in told]
    if others:
        enough = ", ".join(role.name for role in ROLES if not lacking[role]) or "none"
        little = ", ".join(role.name for role in ROLES if lacking[role])
        read = f"enough for: {enough}; not for: {little}"
        yield found("rights.role", read, "; ".join(grants(connection, others)))
