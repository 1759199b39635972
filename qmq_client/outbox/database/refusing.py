"""The error for a connection to a place where rows cannot be written."""

from __future__ import annotations

import sqlalchemy as sa


def refuse(reason: str) -> sa.exc.OperationalError:
    """SQLAlchemy's error with this reason, as if the driver had raised it."""
    return sa.exc.OperationalError(reason, None, ConnectionError(reason))
