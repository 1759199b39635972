"""The revision for ordering keys: an index to find rows by key, and a table of locks.

The first producer with `order_by_key` writes the rows of the lock table, not this revision, so it
does not matter how the tables were created.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from qmq_migrations import steps

revision: Final = "qmq0002"
down_revision: Final = "qmq0001"
branch_labels: Final = None
depends_on: Final = None

#: Set explicitly for MySQL and MariaDB: without row locks all keys would wait for each other.
_ENGINE: Final = "InnoDB"


def upgrade() -> None:
    """Create missing tables and indexes."""
    steps.create_index(_index())
    steps.create_tables([_order_lock()])


def downgrade() -> None:
    """Drop both; no message is lost."""
    steps.drop_tables([_order_lock()])
    steps.drop_index(_index())


def _index() -> sa.Index:
    schema, prefix = steps.names()
    outbox = sa.Table(
        f"{prefix}outbox",
        sa.MetaData(),
        sa.Column("id", sa.BigInteger()),
        sa.Column("ordering_key", sa.String(255)),
        schema=schema,
    )
    has_order = outbox.c.ordering_key.is_not(None)
    return sa.Index(
        f"{prefix}outbox_order",
        outbox.c.ordering_key,
        outbox.c.id,
        postgresql_where=has_order,
        sqlite_where=has_order,
    )


def _order_lock() -> sa.Table:
    schema, prefix = steps.names()
    return sa.Table(
        f"{prefix}order_lock",
        sa.MetaData(),
        sa.Column("slot", sa.Integer(), primary_key=True, autoincrement=False),
        mysql_engine=_ENGINE,
        mariadb_engine=_ENGINE,
        schema=schema,
    )
