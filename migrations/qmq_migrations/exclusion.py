"""A filter for an application's Alembic whose own history does not contain these tables.

Autogenerate would drop tables that are in the database and not in `target_metadata`, with the messages in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: All tables that a migration creates, without the prefix.
TABLES: Final = ("inbox", "order_lock", "outbox", "version")


def include_name(
    name: str | None, kind: str, _parents: Mapping[str, str | None], *, prefix: str = "qmq_"
) -> bool:
    """Whether Alembic compares this object: False for QMQ's tables.

    For `context.configure(include_name=include_name)` in `env.py`; with another prefix than `qmq_`,
    `functools.partial(include_name, prefix="shop_")`.
    """
    return kind != "table" or name not in {f"{prefix}{table}" for table in TABLES}
