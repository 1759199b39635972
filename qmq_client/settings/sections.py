"""The sections of `qmq.toml`: names, types, bounds, built-in values.

Values only; where they come from, and which layer wins, is in `config.py`. A value outside of its
bounds is refused when it is read, never where it is used.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
_Rate = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
_Threads = Annotated[int, msgspec.Meta(ge=1, le=256)]
#: Far above a round trip: rows of a claim that has ended before it is there are never sent.
_Lease = Annotated[int, msgspec.Meta(ge=100, le=86_400_000)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
#: 0 or more, up to ten years: how long something is kept.
_KeptSeconds = Annotated[float, msgspec.Meta(ge=0, le=315_360_000)]
_NAME: Final = r"\A[A-Za-z0-9_.-]{1,63}\Z"
#: Our names begin with it, and the longest of them must be within the 63 bytes of PostgreSQL.
#: None of the characters that end a statement or a quoted name, though every name is quoted: others
#: may write the table of the registry.
PREFIX: Final = r"\A[ !#-:<-\[\]-_a-~]{0,32}\Z"
SCHEMA: Final = r"\A[ !#-:<-\[\]-_a-~]{0,63}\Z"
_TABLE: Final = r"\A[A-Za-z0-9_]{1,63}\Z"
_LISTEN: Final = r"\A(|[^\s/]{1,255}:\d{1,5})\Z"
_Name = Annotated[str, msgspec.Meta(pattern=_NAME)]
_Prefix = Annotated[str, msgspec.Meta(pattern=PREFIX)]
_Schema = Annotated[str, msgspec.Meta(pattern=SCHEMA)]
_Table = Annotated[str, msgspec.Meta(pattern=_TABLE)]
_Listen = Annotated[str, msgspec.Meta(pattern=_LISTEN)]
#: The same in words, for who wrote something else.
RULES: Final = {
    _NAME: "Use 1 to 63 characters of A-Z a-z 0-9 _ . -",
    PREFIX: 'Use up to 32 printable characters of ASCII, and none of " ; ` \\',
    SCHEMA: 'Use up to 63 printable characters of ASCII, and none of " ; ` \\',
    _TABLE: "Use 1 to 63 characters of A-Z a-z 0-9 _",
    _LISTEN: "Use HOST:PORT, like 127.0.0.1:9471",
}


class BrokerSection(msgspec.Struct, frozen=True, kw_only=True):
    """Where this process finds the broker, and what shows who it is."""

    url: str = "http://127.0.0.1:9470"
    #: What `qmq broker token add` printed; better in the environment or a file than here.
    token: str = ""
    #: File that holds the token and nothing else; read again when the broker refuses the one known.
    token_file: str = ""
    #: PEM of the authorities that the broker's certificate may come from; the machine's own else.
    ca_file: str = ""
    #: Own certificate and its key in PEM, for a broker that asks for one.
    cert_file: str = ""
    key_file: str = ""

    def __repr__(self) -> str:
        return f"BrokerSection(url={self.url!r})"


class DatabaseSection(msgspec.Struct, frozen=True, kw_only=True):
    """One business database that carries an outbox."""

    #: How logs and commands call it.
    name: _Name
    #: SQLAlchemy's URL.
    url: str
    #: Name of the environment variable that holds the password; empty when the URL is complete.
    password_env: str = ""
    #: File that holds the password and nothing else, read at each start.
    password_file: str = ""
    #: Schema of the outbox; empty for the connection's own.
    schema: _Schema = ""
    #: What the names of our tables begin with.
    table_prefix: _Prefix = "qmq_"
    #: Each watchdog sends no more rows a second from here; 0 for no bound.
    rows_per_s: _Rate = 0
    #: How long the watchdog keeps rows that were accepted; 0 deletes them at once.
    keep_sent_s: _KeptSeconds = 0.0
    #: How long ids stay in the inbox; 0: forever. Longer than any message may come again.
    keep_inbox_s: _KeptSeconds = 0.0


class RegistrySection(msgspec.Struct, frozen=True, kw_only=True):
    """A table of further databases, looked at while the watchdog runs; off without a `url`."""

    #: SQLAlchemy's URL of the database that has the table.
    url: str = ""
    password_env: str = ""
    password_file: str = ""
    schema: _Schema = ""
    table: _Table = "qmq_database"
    #: How often to look.
    refresh_s: _Seconds = 5.0
    #: Where the files are that a row may name as `password_file`; empty for nowhere.
    password_directory: str = ""


class WatchdogSection(msgspec.Struct, frozen=True, kw_only=True):
    """How the watchdog works; one set for all databases."""

    #: Rows of one claim and one request.
    batch_rows: _Count = 1_000
    #: How long a claim lasts; after that another watchdog may take the rows.
    lease_ms: _Lease = 5_000
    #: A row that the broker answered badly this often is parked.
    max_attempts: _Count = 50
    #: A sweep ends after this many rows …
    sweep_rows_max: _Count = 100_000
    #: … or this many seconds, whichever comes first.
    sweep_s_max: _Seconds = 30.0
    #: In the daemon a database with rows left lets the others go first after this long.
    share_s: _Seconds = 1.0
    #: Wait between sweeps of a database that has nothing due …
    poll_s: _Seconds = 1.0
    #: … and that had nothing for this long …
    idle_after_s: _Seconds = 60.0
    #: … is this. With takeover (5 s) and a share it stays below the 10 s of promise W1.
    idle_poll_s: _Seconds = 3.0
    #: Longest wait between tries while the broker or a database is unreachable.
    outage_s_max: _Seconds = 30.0
    #: Databases that are swept at the same time.
    workers: _Threads = 8
    #: Further ones that hang or are slow, at most; the rest of those waits.
    isolated_workers: _Threads = 24
    #: Open connections to all databases together; what is beyond is opened and closed each time.
    connections_max: _Count = 200
    #: A database that does not take a connection for this long is unreachable.
    connect_s_max: _Seconds = 5.0
    #: A statement that takes longer is given up.
    statement_s_max: _Seconds = 15.0
    #: How often old sent rows and inbox ids of a database are deleted.
    maintenance_s: _Seconds = 60.0
    #: How often the rows of a database are counted for the metrics.
    sample_s: _Seconds = 15.0
    #: `host:port` for /metrics and /healthz; empty for none.
    metrics_listen: _Listen = ""
    #: Time for a clean stop after SIGTERM.
    stop_s: _Seconds = 10.0


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a process."""

    broker: BrokerSection = BrokerSection()
    watchdog: WatchdogSection = WatchdogSection()
    registry: RegistrySection = RegistrySection()
    databases: tuple[DatabaseSection, ...] = ()
