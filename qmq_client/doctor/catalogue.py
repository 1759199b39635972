"""Everything that the doctor looks for: one check each, with what it means when it strikes.

`docs/doctor.md` shows the same table; a test holds both equal.
"""

from __future__ import annotations

from typing import Final

from qmq_client.doctor.check import Check, Severity

_MYSQL: Final = ("mysql",)
_POSTGRESQL: Final = ("postgresql",)
_SQLITE: Final = ("sqlite",)
_SERVERS: Final = ("mysql", "postgresql")
_ALL: Final = ("mysql", "postgresql", "sqlite")
_BROKER: Final = ("broker",)


def _check(
    id_: str, severity: Severity, promise: str, where: tuple[str, ...], meaning: str
) -> Check:
    return Check(id=id_, severity=severity, promise=promise, where=where, meaning=meaning)


_BREAKS, _RISK, _NOTE = Severity.BREAKS, Severity.RISK, Severity.NOTE

CHECKS: Final = (
    # -- tables
    _check(
        "schema.missing",
        _BREAKS,
        "W7",
        _ALL,
        "A table or column is not there, or of another revision: nothing can be sent or received.",
    ),
    _check(
        "table.engine",
        _BREAKS,
        "S1",
        _MYSQL,
        "The engine keeps what a transaction rolled back: messages are sent for what never happened.",
    ),
    _check(
        "table.unlogged",
        _BREAKS,
        "S1",
        _POSTGRESQL,
        "A crash of the server empties the table: committed messages are lost, and effects happen "
        "again.",
    ),
    _check(
        "column.type",
        _BREAKS,
        "S9",
        _ALL,
        "A column holds less or other values than are stored: messages are refused, cut or altered.",
    ),
    _check(
        "column.collation",
        _BREAKS,
        "S9",
        _ALL,
        "Comparing is not exact: names and keys that differ in case or a blank are taken for one. On "
        "PostgreSQL an upgrade of the operating system may change the order, and an index then misses "
        "what is there.",
    ),
    _check(
        "table.key",
        _BREAKS,
        "C5",
        _ALL,
        "A key is missing: the same message may be stored twice, or have its effect twice.",
    ),
    _check(
        "index.missing",
        _RISK,
        "W1",
        _ALL,
        "Every search reads the whole table: sweeps get slow, and lock more than they need.",
    ),
    _check(
        "table.trigger",
        _RISK,
        "O2",
        _ALL,
        "Somebody's trigger, rule or foreign key is on one of our tables. It may refuse what is written "
        "or deleted there, skip it without a word, or alter it: messages are not stored, or their rows "
        "stay for ever. Look what it does; one that only reads may stay.",
    ),
    _check(
        "table.row_security",
        _BREAKS,
        "O1",
        _POSTGRESQL,
        "Row security counts for this user: rows that a policy hides are sent by nobody, out of their "
        "order, or never deleted. Or add a policy that allows this user everything: FOR ALL USING "
        "(true).",
    ),
    # -- durability
    _check(
        "mysql.flush_log",
        _BREAKS,
        "S2",
        _MYSQL,
        "Commits are on disk only later: a crash forgets transactions whose messages were sent. "
        "SET GLOBAL lasts until the restart: write it under [mysqld] too.",
    ),
    _check(
        "mysql.sync_binlog",
        _BREAKS,
        "S2",
        _MYSQL,
        "The binary log is on disk only later: after a crash it and the tables differ, and replicas "
        "lack what was sent. SET GLOBAL lasts until the restart: write it under [mysqld] too.",
    ),
    _check(
        "mysql.binlog_format",
        _BREAKS,
        "O1",
        _MYSQL,
        "The binary log takes statements only, and none of a transaction at READ COMMITTED: no row can "
        "be claimed or deleted. SET GLOBAL lasts until the restart and counts for new connections: "
        "write it under [mysqld] too.",
    ),
    _check(
        "mysql.doublewrite",
        _BREAKS,
        "S2",
        _MYSQL,
        "A page that is half written in a power cut cannot be repaired: committed rows are lost.",
    ),
    _check(
        "postgresql.synchronous_commit",
        _BREAKS,
        "S2",
        _POSTGRESQL,
        "Commits are on disk only later: a crash forgets transactions whose messages were sent.",
    ),
    _check(
        "postgresql.fsync",
        _BREAKS,
        "S2",
        _POSTGRESQL,
        "Nothing is forced to disk: a power cut may lose or destroy everything.",
    ),
    _check(
        "postgresql.full_page_writes",
        _BREAKS,
        "S2",
        _POSTGRESQL,
        "A page that is half written in a power cut cannot be repaired: committed rows are lost.",
    ),
    _check(
        "sqlite.synchronous",
        _BREAKS,
        "S2",
        _SQLITE,
        "Commits are on disk only later: a power cut forgets transactions whose messages were sent. "
        "Run it on every connection, in a `connect` listener of the engine.",
    ),
    _check(
        "sqlite.journal_off",
        _BREAKS,
        "S1",
        _SQLITE,
        "The journal is kept in memory or not at all: a crash leaves half a transaction behind.",
    ),
    _check(
        "sqlite.journal_mode",
        _RISK,
        "S5",
        _SQLITE,
        "Readers and the publisher keep each other from committing; a COMMIT may fail as busy.",
    ),
    # -- how transactions run
    _check(
        "mysql.sql_mode",
        _BREAKS,
        "S9",
        _MYSQL,
        "The server cuts what is too long for a column and says nothing. SET GLOBAL lasts until the "
        "restart and counts for new connections: write it under [mysqld] too.",
    ),
    _check(
        "mysql.max_allowed_packet",
        _RISK,
        "S7",
        _MYSQL,
        "Messages that the limits allow are refused, because one statement cannot carry them. "
        "SET GLOBAL lasts until the restart and counts for new connections: write it under "
        "[mysqld] too.",
    ),
    _check(
        "relay.isolation",
        _BREAKS,
        "W5",
        _SERVERS,
        "The publisher's claims keep the application from inserting, and deadlocks kill its "
        "transactions.",
    ),
    _check(
        "server.read_only",
        _BREAKS,
        "W6",
        _ALL,
        "Rows cannot be claimed or settled here, and a replica shows rows that were sent long ago. On "
        "a replica do not change it: give the primary's address instead.",
    ),
    _check(
        "server.pooler",
        _NOTE,
        "",
        _POSTGRESQL,
        "A pooler stands in between. Ours ask nothing of a session beyond a transaction; in "
        "transaction mode the driver must not prepare statements, unless the pooler knows of them.",
    ),
    _check(
        "sqlite.busy_timeout",
        _RISK,
        "S5",
        _SQLITE,
        "A transaction fails as locked when another one writes, instead of waiting for it. "
        "Run it on every connection, in a `connect` listener of the engine.",
    ),
    _check(
        "session.time_zone",
        _NOTE,
        "",
        _SERVERS,
        "Our times are UTC in any case; what the application stores without a zone is not.",
    ),
    _check(
        "clock.difference",
        _RISK,
        "D1",
        _ALL,
        "The clocks of this machine and of the database differ: delays and ages are off by as much.",
    ),
    # -- what is going on
    _check(
        "transactions.prepared",
        _BREAKS,
        "O1",
        _SERVERS,
        "A transaction was prepared and nobody ended it: its rows stay hidden and locked. Look first "
        "whether it belongs to a coordinator that will come back, and whether it should be committed.",
    ),
    _check(
        "transactions.old",
        _RISK,
        "O1",
        _SERVERS,
        "A transaction is open for long: what it sends waits for it, and so does cleaning up.",
    ),
    _check(
        "rows.parked",
        _RISK,
        "O7",
        _ALL,
        "Messages were given up after too many bad answers and wait for a person.",
    ),
    _check(
        "rows.overdue",
        _RISK,
        "W1",
        _ALL,
        "Messages are due and nobody takes them: no watchdog looks after this database.",
    ),
    _check(
        "rows.unsent",
        _RISK,
        "O1",
        _ALL,
        "A message is tried again and again and was not accepted for long.",
    ),
    _check(
        "rows.undeleted",
        _RISK,
        "O2",
        _ALL,
        "The broker has these messages, and the database keeps their rows when they are to be deleted. "
        "They are not sent again; their deletion is tried again every hour.",
    ),
    _check(
        "rights.missing",
        _NOTE,
        "",
        _SERVERS,
        "A check could not be made, because this user may not read what it needs.",
    ),
    # -- the application's own engine; only `examine` sees it
    _check(
        "session.autocommit",
        _BREAKS,
        "S1",
        _ALL,
        "Sessions commit each statement by itself: a rollback leaves the message. Every send is "
        "refused.",
    ),
    _check(
        "session.bind",
        _BREAKS,
        "S1",
        _ALL,
        "Sessions and outbox have engines of their own and would not commit together. Every send is "
        "refused.",
    ),
    _check(
        "session.hook",
        _BREAKS,
        "S2",
        _ALL,
        "The transactions of this engine are followed by no producer, or by two copies of the "
        "product.",
    ),
    _check(
        "sqlite.explicit_begin",
        _BREAKS,
        "S3",
        _SQLITE,
        "The driver does not begin where SQLAlchemy does: a savepoint at first commits by itself.",
    ),
    _check(
        "pool.small",
        _RISK,
        "S5",
        _ALL,
        "More threads than connections: some wait for a connection, and fail when it takes too long.",
    ),
    # -- the broker
    _check(
        "broker.unreachable",
        _RISK,
        "O1",
        _BROKER,
        "Nobody answers there: messages wait in their databases.",
    ),
    _check(
        "broker.not_ready",
        _RISK,
        "O1",
        _BROKER,
        "The broker lives and does not serve: messages wait in their databases.",
    ),
    _check(
        "broker.read_only",
        _RISK,
        "O1",
        _BROKER,
        "Somebody made the broker read-only: messages wait in their databases until it takes them "
        "again.",
    ),
    _check(
        "broker.disk_reserve",
        _RISK,
        "B6",
        _BROKER,
        "The disk's reserve is reached: the broker takes no messages until there is room.",
    ),
    _check(
        "broker.durability",
        _BREAKS,
        "B1",
        _BROKER,
        "The broker acknowledges before messages are on disk: a power cut loses accepted ones.",
    ),
    _check(
        "broker.access",
        _RISK,
        "O1",
        _BROKER,
        "The broker does not know who asks: messages wait in their databases.",
    ),
    _check(
        "broker.delayed_clock",
        _RISK,
        "D1",
        _BROKER,
        "The clock of the broker's machine was moved: delayed messages are held until it has caught "
        "up, or come slowly.",
    ),
    _check(
        "broker.delayed_damage",
        _RISK,
        "D3",
        _BROKER,
        "Delayed messages cannot be read and are held, whatever their time; the others are released.",
    ),
    _check(
        "broker.token_in_clear",
        _RISK,
        "",
        _BROKER,
        "Whoever listens on the way reads the token and every message.",
    ),
)

CHECK_BY_ID: Final = {check.id: check for check in CHECKS}
