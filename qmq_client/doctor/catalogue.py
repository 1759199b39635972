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


_UNTIL_RESTART: Final = "SET GLOBAL lasts until the server restarts, so set it under [mysqld] too."
_NEW_CONNECTIONS: Final = (
    "SET GLOBAL applies to new connections and lasts until the server restarts, so set it under "
    "[mysqld] too."
)
_BREAKS, _RISK, _NOTE = Severity.BREAKS, Severity.RISK, Severity.NOTE

CHECKS: Final = (
    # -- tables
    _check(
        "schema.missing",
        _BREAKS,
        "W7",
        _ALL,
        "A table or column is missing or of another revision: nothing can be sent or received.",
    ),
    _check(
        "table.engine",
        _BREAKS,
        "S1",
        _MYSQL,
        "This engine cannot roll back: messages are sent for changes that never happened.",
    ),
    _check(
        "table.unlogged",
        _BREAKS,
        "S1",
        _POSTGRESQL,
        "A server crash empties this table: committed messages are lost, effects happen again.",
    ),
    _check(
        "column.type",
        _BREAKS,
        "S9",
        _ALL,
        "The column cannot hold all that is stored in it: messages are refused, cut or altered.",
    ),
    _check(
        "column.collation",
        _BREAKS,
        "S9",
        _ALL,
        "Comparisons are not exact: names and keys that differ in case or a trailing blank "
        "count as equal. On PostgreSQL a system upgrade may change the order, and indexes then "
        "miss rows.",
    ),
    _check(
        "table.key",
        _BREAKS,
        "C5",
        _ALL,
        "A key is missing: a message may be stored twice, or take effect twice.",
    ),
    _check(
        "index.missing",
        _RISK,
        "W1",
        _ALL,
        "Every search reads the whole table: sweeps are slow and lock more rows than they need.",
    ),
    _check(
        "table.trigger",
        _RISK,
        "O2",
        _ALL,
        "Somebody's trigger, rule or foreign key is on one of our tables. It may refuse, "
        "silently skip or alter what we write or delete there: messages are not stored, or "
        "their rows are never deleted. Check what it does; one that only reads may stay.",
    ),
    _check(
        "table.row_security",
        _BREAKS,
        "O1",
        _POSTGRESQL,
        "Row security applies to this user: rows that a policy hides are never sent, sent out "
        "of order, or never deleted. Instead of switching it off you can add a policy that "
        "allows this user everything: FOR ALL USING (true).",
    ),
    # -- durability
    _check(
        "mysql.flush_log",
        _BREAKS,
        "S2",
        _MYSQL,
        "Commits reach the disk later: a crash undoes transactions whose messages were sent. "
        f"{_UNTIL_RESTART}",
    ),
    _check(
        "mysql.sync_binlog",
        _BREAKS,
        "S2",
        _MYSQL,
        "The binary log reaches the disk later: after a crash it differs from the tables, and "
        f"replicas lack messages that were sent. {_UNTIL_RESTART}",
    ),
    _check(
        "mysql.binlog_format",
        _BREAKS,
        "O1",
        _MYSQL,
        "The binary log records statements only and refuses transactions at READ COMMITTED: no "
        f"row can be claimed or deleted. {_NEW_CONNECTIONS}",
    ),
    _check(
        "mysql.doublewrite",
        _BREAKS,
        "S2",
        _MYSQL,
        "A page half written in a power cut cannot be repaired: committed rows are lost.",
    ),
    _check(
        "postgresql.synchronous_commit",
        _BREAKS,
        "S2",
        _POSTGRESQL,
        "Commits reach the disk later: a crash undoes transactions whose messages were sent.",
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
        "A page half written in a power cut cannot be repaired: committed rows are lost.",
    ),
    _check(
        "sqlite.synchronous",
        _BREAKS,
        "S2",
        _SQLITE,
        "Commits reach the disk later: a power cut undoes transactions whose messages were "
        "already sent. Run the fix on every connection, in a `connect` listener of the engine.",
    ),
    _check(
        "sqlite.journal_off",
        _BREAKS,
        "S1",
        _SQLITE,
        "The journal is in memory or switched off: a crash leaves half a transaction behind.",
    ),
    _check(
        "sqlite.journal_mode",
        _RISK,
        "S5",
        _SQLITE,
        "Readers and the publisher block each other's commits; a COMMIT may fail as busy.",
    ),
    # -- how transactions run
    _check(
        "mysql.sql_mode",
        _BREAKS,
        "S9",
        _MYSQL,
        "The server silently cuts off values that are too long for their column. "
        f"{_NEW_CONNECTIONS}",
    ),
    _check(
        "mysql.max_allowed_packet",
        _RISK,
        "S7",
        _MYSQL,
        "Messages within the limits are refused because they do not fit into one statement. "
        f"{_NEW_CONNECTIONS}",
    ),
    _check(
        "relay.isolation",
        _BREAKS,
        "W5",
        _SERVERS,
        "The publisher's claims block the application's inserts, and deadlocks end transactions.",
    ),
    _check(
        "server.read_only",
        _BREAKS,
        "W6",
        _ALL,
        "Rows cannot be claimed or settled here, and a replica shows rows that were sent long "
        "ago. If this is a replica, do not change it: use the primary's address.",
    ),
    _check(
        "server.pooler",
        _NOTE,
        "",
        _POSTGRESQL,
        "There is a pooler in between. Ours need nothing that outlives a transaction; but in "
        "transaction mode the driver must not prepare statements unless the pooler supports "
        "that.",
    ),
    _check(
        "sqlite.busy_timeout",
        _RISK,
        "S5",
        _SQLITE,
        "A transaction fails as locked when another one is writing, instead of waiting. Run the "
        "fix on every connection, in a `connect` listener of the engine.",
    ),
    _check(
        "session.time_zone",
        _NOTE,
        "",
        _SERVERS,
        "Our own times are UTC; times that the application stores without a zone are not.",
    ),
    _check(
        "clock.difference",
        _RISK,
        "D1",
        _ALL,
        "The clocks of this machine and the database differ: delays and ages are off by that much.",
    ),
    # -- what is going on
    _check(
        "transactions.prepared",
        _BREAKS,
        "O1",
        _SERVERS,
        "A transaction was prepared and never ended: its rows stay hidden and locked. First "
        "find out whether its coordinator will come back, and whether it should be committed.",
    ),
    _check(
        "transactions.old",
        _RISK,
        "O1",
        _SERVERS,
        "A transaction has been open for long: its messages wait for it, and so does cleaning up.",
    ),
    _check(
        "rows.parked",
        _RISK,
        "O7",
        _ALL,
        "Messages were given up after too many failed attempts and wait for a person.",
    ),
    _check(
        "rows.overdue",
        _RISK,
        "W1",
        _ALL,
        "Messages are due and nobody sends them: no watchdog looks after this database.",
    ),
    _check(
        "rows.unsent",
        _RISK,
        "O1",
        _ALL,
        "A message has been tried again and again for long and is still not accepted.",
    ),
    _check(
        "rows.undeleted",
        _RISK,
        "O2",
        _ALL,
        "The broker has these messages, but the database does not delete their rows. They are "
        "not sent again; their deletion is tried again every hour.",
    ),
    _check(
        "rights.missing",
        _NOTE,
        "",
        _SERVERS,
        "A check was left out because this user may not read what it needs.",
    ),
    # -- the application's own engine; only `examine` sees it
    _check(
        "session.autocommit",
        _BREAKS,
        "S1",
        _ALL,
        "Sessions commit each statement by itself, so a rollback would leave the message. Every "
        "send is refused.",
    ),
    _check(
        "session.bind",
        _BREAKS,
        "S1",
        _ALL,
        "Sessions and outbox use different engines and would not commit together. Every send is "
        "refused.",
    ),
    _check(
        "session.hook",
        _BREAKS,
        "S2",
        _ALL,
        "No producer follows this engine's transactions, or two copies of the product do.",
    ),
    _check(
        "sqlite.explicit_begin",
        _BREAKS,
        "S3",
        _SQLITE,
        "The driver begins later than SQLAlchemy: a savepoint that comes first commits by itself.",
    ),
    _check(
        "pool.small",
        _RISK,
        "S5",
        _ALL,
        "More threads than connections: some wait for one, and fail if that takes too long.",
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
        "The broker is running but not serving: messages wait in their databases.",
    ),
    _check(
        "broker.read_only",
        _RISK,
        "O1",
        _BROKER,
        "Somebody made the broker read-only: messages wait in their databases until that ends.",
    ),
    _check(
        "broker.disk_reserve",
        _RISK,
        "B6",
        _BROKER,
        "The disk is down to its reserve: the broker accepts no messages until there is room.",
    ),
    _check(
        "broker.durability",
        _BREAKS,
        "B1",
        _BROKER,
        "The broker acknowledges messages before they are on disk: a power cut loses some.",
    ),
    _check(
        "broker.access",
        _RISK,
        "O1",
        _BROKER,
        "The broker does not accept these credentials: messages wait in their databases.",
    ),
    _check(
        "broker.delayed_clock",
        _RISK,
        "D1",
        _BROKER,
        "The broker's clock was changed: delayed messages are held until it has caught up, or "
        "are released slowly.",
    ),
    _check(
        "broker.delayed_damage",
        _RISK,
        "D3",
        _BROKER,
        "Some delayed messages cannot be read and are held back; the others are released on time.",
    ),
    _check("broker.keeper", _RISK, "B6", _BROKER, "Segments wait for an archive: the disk fills."),
    _check(
        "broker.token_in_clear",
        _RISK,
        "",
        _BROKER,
        "Anybody listening on the network can read the token and every message.",
    ),
)

CHECK_BY_ID: Final = {check.id: check for check in CHECKS}
