"""What this user may not read: told as a finding, with the GRANT that somebody else may give."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from qmq_client.doctor.finding import Finding, found
from qmq_client.outbox.database.driver import error_number

#: Denied for the database, the table, a column, the whole server; MySQL 8 denies XA RECOVER as 1401.
_MYSQL: Final = (1044, 1142, 1143, 1227, 1401)
_POSTGRESQL: Final = "42501"


def is_denied(error: sa.exc.DBAPIError) -> bool:
    """Whether a statement failed for want of a right."""
    sqlstate = getattr(error.orig, "sqlstate", None)
    return sqlstate == _POSTGRESQL or error_number(error.orig) in _MYSQL


def missing(connection: sa.Connection, right: str, read: str) -> Finding:
    """The finding; `right` is what stands between GRANT and TO."""
    return found("rights.missing", read, f"GRANT {right} TO {user(connection)}")


def user(connection: sa.Connection) -> str:
    """Who we are to the server, as statements have it."""
    if connection.dialect.name == "postgresql":
        return str(connection.exec_driver_sql("SELECT quote_ident(session_user)").scalar_one())
    whole: str = connection.exec_driver_sql("SELECT CURRENT_USER()").scalar_one()
    name, _, host = whole.rpartition("@")
    return f"'{name}'@'{host}'"
