"""The catalogue of the doctor's checks: id, severity, guarantee, databases, and the meaning of a finding.

`docs/doctor.md` shows the same table; a test compares the two.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from qmq_client.doctor.broker_checks import BROKER_CHECKS
from qmq_client.doctor.check import Severity, check_of

_MYSQL: Final = ("mysql",)
_POSTGRESQL: Final = ("postgresql",)
_SQLITE: Final = ("sqlite",)
_SERVERS: Final = ("mysql", "postgresql")
_ALL: Final = ("mysql", "postgresql", "sqlite")

_UNTIL_RESTART: Final = "SET GLOBAL lasts until the server restarts, so set it under [mysqld] too."
_NEW_CONNECTIONS: Final = (
    "SET GLOBAL applies to new connections and lasts until the server restarts, so set it under "
    "[mysqld] too."
)
_BREAKS, _RISK, _NOTE = Severity.BREAKS, Severity.RISK, Severity.NOTE

CHECKS: Final = (
    # -- tables
    check_of(
        "schema.missing",
        _BREAKS,
        "W7",
        _ALL,
        "A table or column is missing or of another revision: nothing can be sent or received.",
    ),
    check_of(
        "table.engine",
        _BREAKS,
        "S1",
        _MYSQL,
        "This engine cannot roll back: messages are sent for changes that never happened.",
    ),
    check_of(
        "table.unlogged",
        _BREAKS,
        "S1",
        _POSTGRESQL,
        "A server crash empties this table: committed messages are lost, effects happen again.",
    ),
    check_of(
        "column.type",
        _BREAKS,
        "S9",
        _ALL,
        "The column cannot hold all that is stored in it: messages are refused, cut or altered.",
    ),
    check_of(
        "column.collation",
        _BREAKS,
        "S9",
        _ALL,
        "Comparisons are not exact: names and keys that differ in case or a trailing blank "
        "count as equal. On PostgreSQL a system upgrade may change the order, and indexes then "
        "miss rows.",
    ),
    check_of(
        "table.key",
        _BREAKS,
        "C5",
        _ALL,
        "A key is missing: a message may be stored twice, or take effect twice.",
    ),
    check_of(
        "index.missing",
        _RISK,
        "W1",
        _ALL,
        "Every search reads the whole table: sweeps are slow and lock more rows than they need.",
    ),
    check_of(
        "table.trigger",
        _RISK,
        "O2",
        _ALL,
        "One of QMQ's tables has a trigger, rule or foreign key of another owner. It may refuse, "
        "silently skip or alter what QMQ writes or deletes there: messages are not stored, or "
        "their rows are never deleted. Check what it does; one that only reads may stay.",
    ),
    check_of(
        "table.row_security",
        _BREAKS,
        "O1",
        _POSTGRESQL,
        "Row security applies to this user: rows that a policy hides are never sent, sent out "
        "of order, or never deleted. Instead of switching it off you can add a policy that "
        "allows this user everything: FOR ALL USING (true).",
    ),
    # -- durability
    check_of(
        "mysql.flush_log",
        _BREAKS,
        "S2",
        _MYSQL,
        "Commits reach the disk later: a crash undoes transactions whose messages were sent. "
        f"{_UNTIL_RESTART}",
    ),
    check_of(
        "mysql.sync_binlog",
        _BREAKS,
        "S2",
        _MYSQL,
        "The binary log reaches the disk later: after a crash it differs from the tables, and "
        f"replicas lack messages that were sent. {_UNTIL_RESTART}",
    ),
    check_of(
        "mysql.binlog_format",
        _BREAKS,
        "O1",
        _MYSQL,
        "The binary log records statements only and refuses transactions at READ COMMITTED: no "
        f"row can be claimed or deleted. {_NEW_CONNECTIONS}",
    ),
    check_of(
        "mysql.doublewrite",
        _BREAKS,
        "S2",
        _MYSQL,
        "A page half written in a power cut cannot be repaired: committed rows are lost.",
    ),
    check_of(
        "postgresql.synchronous_commit",
        _BREAKS,
        "S2",
        _POSTGRESQL,
        "Commits reach the disk later: a crash undoes transactions whose messages were sent.",
    ),
    check_of(
        "postgresql.fsync",
        _BREAKS,
        "S2",
        _POSTGRESQL,
        "Nothing is forced to disk: a power cut may lose or destroy everything.",
    ),
    check_of(
        "postgresql.full_page_writes",
        _BREAKS,
        "S2",
        _POSTGRESQL,
        "A page half written in a power cut cannot be repaired: committed rows are lost.",
    ),
    check_of(
        "sqlite.synchronous",
        _BREAKS,
        "S2",
        _SQLITE,
        "Commits reach the disk later: a power cut undoes transactions whose messages were "
        "already sent. Run the fix on every connection, in a `connect` listener of the engine.",
    ),
    check_of(
        "sqlite.journal_off",
        _BREAKS,
        "S1",
        _SQLITE,
        "The journal is in memory or switched off: a crash leaves half a transaction behind.",
    ),
    check_of(
        "sqlite.journal_mode",
        _RISK,
        "S5",
        _SQLITE,
        "Readers and the publisher block each other's commits; a COMMIT may fail as busy.",
    ),
    # -- how transactions run
    check_of(
        "mysql.sql_mode",
        _BREAKS,
        "S9",
        _MYSQL,
        "The server silently cuts off values that are too long for their column. "
        f"{_NEW_CONNECTIONS}",
    ),
    check_of(
        "mysql.max_allowed_packet",
        _RISK,
        "S7",
        _MYSQL,
        "Messages within the limits are refused because they do not fit into one statement. "
        f"{_NEW_CONNECTIONS}",
    ),
    check_of(
        "server.read_only",
        _BREAKS,
        "W6",
        _ALL,
        "Rows cannot be claimed or settled here, and a replica shows rows that were sent long "
        "ago. If this is a replica, do not change it: use the primary's address.",
    ),
    check_of(
        "server.pooler",
        _NOTE,
        "",
        _POSTGRESQL,
        "There is a pooler in between. QMQ's connections need no state that outlives a transaction; but in "
        "transaction mode the driver must not prepare statements unless the pooler supports "
        "that.",
    ),
    check_of(
        "sqlite.busy_timeout",
        _RISK,
        "S5",
        _SQLITE,
        "A transaction fails as locked when another one is writing, instead of waiting. Run the "
        "fix on every connection, in a `connect` listener of the engine.",
    ),
    check_of(
        "session.time_zone",
        _NOTE,
        "",
        _SERVERS,
        "QMQ stores times in UTC; times that the application stores without a zone are not UTC.",
    ),
    check_of(
        "clock.difference",
        _RISK,
        "D1",
        _ALL,
        "The clocks of this machine and the database differ: delays and ages are off by that much.",
    ),
    # -- activity
    check_of(
        "transactions.prepared",
        _BREAKS,
        "O1",
        _SERVERS,
        "A transaction was prepared and never ended: its rows stay hidden and locked. First "
        "find out whether its coordinator will come back, and whether it should be committed.",
    ),
    check_of(
        "transactions.old",
        _RISK,
        "O1",
        _SERVERS,
        "A transaction has been open for long: its messages wait for it, and so does cleaning up.",
    ),
    check_of(
        "rows.parked",
        _RISK,
        "O7",
        _ALL,
        "Messages were given up after too many failed attempts and wait for a person.",
    ),
    check_of(
        "rows.overdue",
        _RISK,
        "W1",
        _ALL,
        "Messages are due and not sent: no watchdog sweeps this database.",
    ),
    check_of(
        "rows.unsent",
        _RISK,
        "O1",
        _ALL,
        "A message has been tried again and again for long and is still not accepted.",
    ),
    check_of(
        "rows.undeleted",
        _RISK,
        "O2",
        _ALL,
        "The broker has these messages, but the database does not delete their rows. They are "
        "not sent again; their deletion is tried again every hour.",
    ),
    check_of(
        "rights.write",
        _BREAKS,
        "O1",
        _SERVERS,
        "This user may read the outbox but neither send nor publish: as the user of a producer or "
        "of a watchdog it leaves messages unsent, or their rows undeleted. A user who only reads needs no more rights.",
    ),
    check_of(
        "rights.role",
        _NOTE,
        "",
        _SERVERS,
        "The rights of this user are not enough for all of QMQ's processes. Give it only those "
        "that its process needs.",
    ),
    check_of(
        "rights.missing",
        _NOTE,
        "",
        _SERVERS,
        "A check was left out because this user may not read what it needs.",
    ),
    # -- the application's own engine, which only `examine` sees
    check_of(
        "driver.aiomysql",
        _BREAKS,
        "S9",
        _MYSQL,
        "With this version of PyMySQL the driver cannot write bytes: every send fails.",
    ),
    check_of(
        "session.autocommit",
        _BREAKS,
        "S1",
        _ALL,
        "Sessions commit each statement by itself, so a rollback would leave the message. Every "
        "send is refused.",
    ),
    check_of(
        "session.bind",
        _BREAKS,
        "S1",
        _ALL,
        "Sessions and outbox use different engines and would not commit together. Every send is "
        "refused.",
    ),
    check_of(
        "session.engines",
        _RISK,
        "S1",
        _ALL,
        "The transaction of a session also runs on another engine: the two commits are not one.",
    ),
    check_of(
        "sqlite.explicit_begin",
        _RISK,
        "S3",
        _SQLITE,
        "The driver begins later than SQLAlchemy: a savepoint that comes first commits by itself, with the "
        "messages and rows in it.",
    ),
    check_of(
        "pool.small",
        _RISK,
        "S5",
        _ALL,
        "More threads than connections that are kept: the others connect again for each transaction, "
        "or wait for one and fail if that takes too long.",
    ),
    # -- the broker
    *BROKER_CHECKS,
)

CHECK_BY_ID: Final = {check.id: check for check in CHECKS}
#: The kind of a check, by the first part of its id.
_AREAS: Final = {
    "schema": "tables",
    "table": "tables",
    "column": "tables",
    "index": "tables",
    "mysql": "settings",
    "postgresql": "settings",
    "sqlite": "settings",
    "server": "settings",
    "session": "settings",
    "transactions": "open transactions",
    "rows": "unsent messages",
    "rights": "rights",
    "clock": "clock",
    "broker": "the broker's answers",
}
_ONLY_EXAMINE: Final = frozenset(
    {
        "driver.aiomysql",
        "pool.small",
        "session.autocommit",
        "session.bind",
        "session.engines",
        "sqlite.busy_timeout",
        "sqlite.explicit_begin",
        "sqlite.synchronous",
    }
)


def checked_by_command(where: str) -> dict[str, int]:
    """The number of checks of each kind that `qmq doctor` makes; `where`: a kind of database, or `broker`."""
    return Counter(
        _AREAS[check.id.partition(".")[0]]
        for check in CHECKS
        if where in check.where and check.id not in _ONLY_EXAMINE
    )
