"""The tables next to the business data: outbox, inbox, and the locks of ordering keys.

One outbox row is one message that waits for the broker's answer; see `docs/guarantees.md` S1, O1
and O3. Searches use only `state` and `due_at_ms`. Until `due_at_ms` only the owner of `token`
may touch the row: first this is the takeover time, then a lease, then a backoff. All times are
integer milliseconds UTC by the database's own clock.

Types are those of SQLAlchemy's core, with a variant where a database needs another one: MySQL's
default collation would merge `a` and `A`, and its BLOB ends at 65,535 bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.mysql import LONGBLOB

from qmq_client.errors import ConfigurationError
from qmq_client.given import checked
from qmq_client.ids import TOKEN_BYTES
from qmq_client.settings.sections import PREFIX, RULES, SCHEMA
from qmq_client.wire.limits import KEY_BYTES_MAX, NAME_BYTES_MAX
from qmq_client.wire.message_id import MESSAGE_ID_BYTES
from qmq_client.wire.shown import shorten

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

#: States of an outbox row.
LIVE: Final = 0
#: The row has used up its attempts or was refused; it waits for a person.
PARKED: Final = 1
#: Accepted and kept; only if rows are kept for an audit.
SENT: Final = 2

DEFAULT_PREFIX: Final = "qmq_"
#: Revisions of these tables that this version can work with, the newest last.
REVISIONS: Final = ("qmq0002",)
#: Rows of the lock table. Two keys that share one wait for each other, from INSERT to COMMIT.
ORDER_LOCKS: Final = 256
#: Execution options for QMQ's statements on the application's connection: the application's
#: `schema_translate_map` must not apply to QMQ's tables.
AS_NAMED: Final[dict[str, Any]] = {"schema_translate_map": None}
_MYSQL: Final = ("mysql", "mariadb")
#: `sqlite3.LEGACY_TRANSACTION_CONTROL`, which Python has from 3.12 on.
_LEGACY_CONTROL: Final = -1

#: The server's default engine may be one that cannot roll back.
_ENGINE: Final[dict[str, Any]] = {"mysql_engine": "InnoDB", "mariadb_engine": "InnoDB"}

metadata = sa.MetaData()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The tables of one database."""

    outbox: sa.Table
    inbox: sa.Table
    #: One row for each slot, never changed; see `ordering.py`. Filled by the first producer that
    #: keeps order.
    order_lock: sa.Table

    @property
    def all(self) -> tuple[sa.Table, ...]:
        """All tables, each once."""
        return self.outbox, self.inbox, self.order_lock


def make_tables(
    metadata: sa.MetaData, *, schema: str | None = None, prefix: str = DEFAULT_PREFIX
) -> Tables:
    """The tables as part of `metadata`, which may be the application's own, named with `prefix`.

    Raises `ConfigurationError` for a schema or prefix that commands and the watchdog refuse too: more than 63 or 32 characters, or others than `settings.sections` allows.
    """
    if not isinstance(metadata, sa.MetaData):
        raise _refuse("metadata", metadata, "Give a MetaData, like `Base.metadata`")
    if schema is not None and not (_is_text(schema) and re.match(SCHEMA, schema)):
        raise _refuse("schema", schema, RULES[SCHEMA])
    if not (_is_text(prefix) and re.match(PREFIX, prefix)):
        raise _refuse("prefix", prefix, RULES[PREFIX])
    outbox = sa.Table(
        f"{prefix}outbox",
        metadata,
        sa.Column("id", _counter(), primary_key=True, autoincrement=True),
        sa.Column("message_id", _fixed_bytes(MESSAGE_ID_BYTES), nullable=False, unique=True),
        sa.Column("subject", _exact_text(NAME_BYTES_MAX, "ascii_bin"), nullable=False),
        sa.Column("ordering_key", _exact_text(KEY_BYTES_MAX, "utf8mb4_bin"), nullable=True),
        sa.Column("record", sa.LargeBinary().with_variant(LONGBLOB(), *_MYSQL), nullable=False),
        sa.Column("state", sa.SmallInteger(), nullable=False),
        sa.Column("due_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("token", _fixed_bytes(TOKEN_BYTES), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("last_error", _any_text(), nullable=True),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Index(f"{prefix}outbox_state_due", "state", "due_at_ms"),
        schema=schema,
        **_ENGINE,
    )
    # A partial index costs nothing without ordering keys; MySQL has no partial indexes.
    has_order = outbox.c.ordering_key.is_not(None)
    sa.Index(
        f"{prefix}outbox_order",
        outbox.c.ordering_key,
        outbox.c.id,
        postgresql_where=has_order,
        sqlite_where=has_order,
    )
    inbox = sa.Table(
        f"{prefix}inbox",
        metadata,
        sa.Column("consumer_group", _exact_text(NAME_BYTES_MAX, "ascii_bin"), primary_key=True),
        sa.Column("message_id", _fixed_bytes(MESSAGE_ID_BYTES), primary_key=True),
        sa.Column("received_at_ms", sa.BigInteger(), nullable=False),
        sa.Index(f"{prefix}inbox_received", "received_at_ms"),
        schema=schema,
        **_ENGINE,
    )
    order_lock = sa.Table(
        f"{prefix}order_lock",
        metadata,
        sa.Column("slot", sa.Integer(), primary_key=True, autoincrement=False),
        schema=schema,
        **_ENGINE,
    )
    return Tables(outbox=outbox, inbox=inbox, order_lock=order_lock)


def _is_text(name: object) -> bool:
    return isinstance(name, str)


def _refuse(argument: str, value: object, rule: str) -> ConfigurationError:
    return ConfigurationError(
        setting=f"{argument} of make_tables", value=shorten(value), remedy=f"{rule}."
    )


def create_tables(engine: sa.Engine, tables: Tables | None = None) -> None:
    """Create the tables that are missing; existing ones stay as they are.

    For first steps and tests; in production, migrations do this (`qmq db migrate`). A new SQLite
    file gets a write-ahead log. For an asynchronous engine there is `create_tables_async`.
    """
    chosen = checked("tables of create_tables", tables, Tables, DEFAULT_TABLES)
    if not _is_synchronous(engine):
        raise _not_synchronous(engine)
    try:
        with engine.connect() as connection:
            _create(connection, chosen)
    except sa.exc.MissingGreenlet as error:  # the one inside an `AsyncEngine`
        raise _not_synchronous(engine) from error


async def create_tables_async(engine: AsyncEngine, tables: Tables | None = None) -> None:
    """The same as `create_tables`, for an asynchronous engine."""
    chosen = checked("tables of create_tables_async", tables, Tables, DEFAULT_TABLES)
    if not isinstance(getattr(engine, "sync_engine", None), sa.Engine):
        raise ConfigurationError(
            setting="engine of create_tables_async",
            value=shorten(engine),
            remedy="Give an `AsyncEngine`; for an `Engine` there is `create_tables(engine)`.",
        )
    async with engine.connect() as connection:
        await connection.run_sync(_create, chosen)


def _is_synchronous(engine: object) -> bool:
    return isinstance(engine, sa.Engine)


def _not_synchronous(engine: object) -> ConfigurationError:
    return ConfigurationError(
        setting="engine of create_tables",
        value=shorten(engine),
        remedy="Give an `Engine`, or `await create_tables_async(engine)` with an `AsyncEngine`.",
    )


def _create(connection: sa.Connection, tables: Tables) -> None:
    """Requires: no transaction has begun on this connection."""
    if connection.dialect.name == "sqlite":
        choose_journal(connection.connection.dbapi_connection)
    tables.outbox.metadata.create_all(connection, tables=list(tables.all))
    connection.commit()


def choose_journal(driver: Any, _: object = None) -> None:
    """Give a SQLite file that is still empty a write-ahead log, which the file then keeps.

    With a rollback journal, readers and the publisher block each other's commits. May be a
    listener of an engine's `connect`.
    """
    refuse_autocommit_of_python(driver)
    cursor = driver.cursor()
    cursor.execute("PRAGMA page_count")
    if cursor.fetchone() == (0,):
        cursor.execute("PRAGMA journal_mode = WAL")
    cursor.close()


def refuse_autocommit_of_python(driver: Any) -> None:
    """Raise `ConfigurationError` for a SQLite connection that was opened with `autocommit`.

    Python 3.12 and later have two such modes: one ignores `commit`, the other is always in a
    transaction, which has not taken the write lock.
    """
    mode = getattr(driver, "autocommit", _LEGACY_CONTROL)
    if mode != _LEGACY_CONTROL:
        raise ConfigurationError(
            setting="engine",
            value=f"SQLite with autocommit={mode}",
            remedy="Leave `autocommit` out of `connect_args`: a producer makes transactions of SQLite begin and end with those of SQLAlchemy.",
        )


def _counter() -> sa.types.TypeEngine[int]:
    # SQLite assigns row numbers only in a column of exactly this type.
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _fixed_bytes(byte_count: int) -> sa.types.TypeEngine[bytes]:
    return sa.LargeBinary(byte_count).with_variant(sa.BINARY(byte_count), *_MYSQL)


def _any_text() -> sa.types.TypeEngine[str]:
    # An error may quote any text; MySQL would otherwise only accept its default character set.
    return sa.Text().with_variant(sa.Text(collation="utf8mb4_bin"), *_MYSQL)


def _exact_text(byte_count: int, mysql_collation: str) -> sa.types.TypeEngine[str]:
    in_mysql = sa.String(byte_count, collation=mysql_collation)
    in_postgresql = sa.String(byte_count, collation="C")
    return (
        sa.String(byte_count)
        .with_variant(in_mysql, *_MYSQL)
        .with_variant(in_postgresql, "postgresql")
    )


DEFAULT_TABLES: Final = make_tables(metadata)
