"""The revision that creates outbox and inbox.

The tables are defined here and not imported from the client, because a revision must not change
when the client's definition does; a test checks that both are equal.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from qmq_migrations import steps

revision: Final = "qmq0001"
down_revision: Final = None
branch_labels: Final = ("qmq",)
depends_on: Final = None

_MYSQL: Final = ("mysql", "mariadb")
#: Set explicitly for both, because a server's default engine may not roll back.
_ENGINE: Final = "InnoDB"


def upgrade() -> None:
    """Create missing tables and indexes."""
    steps.create_tables(_tables(*steps.names()))


def downgrade() -> None:
    """Drop both tables, with every message that still waits in them."""
    steps.drop_tables(list(reversed(_tables(*steps.names()))))


def _tables(schema: str | None, prefix: str) -> list[sa.Table]:
    metadata = sa.MetaData(schema=schema)
    outbox = sa.Table(
        f"{prefix}outbox",
        metadata,
        sa.Column("id", _counter(), primary_key=True, autoincrement=True),
        sa.Column("message_id", _fixed_bytes(16), nullable=False, unique=True),
        sa.Column("subject", _exact_text(127, "ascii_bin"), nullable=False),
        sa.Column("ordering_key", _exact_text(255, "utf8mb4_bin"), nullable=True),
        sa.Column("record", sa.LargeBinary(2**32 - 1), nullable=False),
        sa.Column("state", sa.SmallInteger(), nullable=False),
        sa.Column("due_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("token", _fixed_bytes(16), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("last_error", _any_text(), nullable=True),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Index(f"{prefix}outbox_state_due", "state", "due_at_ms"),
        mysql_engine=_ENGINE,
        mariadb_engine=_ENGINE,
    )
    inbox = sa.Table(
        f"{prefix}inbox",
        metadata,
        sa.Column("consumer_group", _exact_text(127, "ascii_bin"), primary_key=True),
        sa.Column("message_id", _fixed_bytes(16), primary_key=True),
        sa.Column("received_at_ms", sa.BigInteger(), nullable=False),
        sa.Index(f"{prefix}inbox_received", "received_at_ms"),
        mysql_engine=_ENGINE,
        mariadb_engine=_ENGINE,
    )
    return [outbox, inbox]


def _counter() -> sa.types.TypeEngine[int]:
    # SQLite assigns row numbers only in a column of exactly this type.
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _fixed_bytes(byte_count: int) -> sa.types.TypeEngine[bytes]:
    return sa.LargeBinary(byte_count).with_variant(sa.BINARY(byte_count), *_MYSQL)


def _any_text() -> sa.types.TypeEngine[str]:
    # An error may quote any text; MySQL would otherwise only accept its default character set.
    return sa.Text().with_variant(sa.Text(collation="utf8mb4_bin"), *_MYSQL)


def _exact_text(byte_count: int, mysql_collation: str) -> sa.types.TypeEngine[str]:
    return (
        sa.String(byte_count)
        .with_variant(sa.String(byte_count, collation=mysql_collation), *_MYSQL)
        .with_variant(sa.String(byte_count, collation="C"), "postgresql")
    )
