"""The sections of `qmq.toml`: names, types, limits, built-in values.

Values only; `config.py` reads the layers and merges them. A value outside of its limits is refused when it is read.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
_Rate = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
_Threads = Annotated[int, msgspec.Meta(ge=1, le=256)]
#: Least lease, far above a round trip: rows whose lease ends before the claim's answer arrives are never sent.
_Lease = Annotated[int, msgspec.Meta(ge=100, le=86_400_000)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
#: A retention time: 0 to ten years.
_KeptSeconds = Annotated[float, msgspec.Meta(ge=0, le=315_360_000)]
_NAME: Final = r"\A[A-Za-z0-9_.-]{1,63}\Z"
#: The prefix of QMQ's tables; the longest name must fit the 63 bytes of PostgreSQL. Characters that
#: end a statement or a quoted name are excluded although every name is quoted, because others may
#: write the registry's table.
PREFIX: Final = r"\A[ !#-:<-\[\]-_a-~]{0,32}\Z"
SCHEMA: Final = r"\A[ !#-:<-\[\]-_a-~]{0,63}\Z"
_TABLE: Final = r"\A[A-Za-z0-9_]{1,63}\Z"
_LISTEN: Final = r"\A(|[^\s/]{1,255}:\d{1,5})\Z"
_Name = Annotated[str, msgspec.Meta(pattern=_NAME)]
_Prefix = Annotated[str, msgspec.Meta(pattern=PREFIX)]
_Schema = Annotated[str, msgspec.Meta(pattern=SCHEMA)]
_Table = Annotated[str, msgspec.Meta(pattern=_TABLE)]
_Listen = Annotated[str, msgspec.Meta(pattern=_LISTEN)]
#: The rules as remedies in error texts.
RULES: Final = {
    _NAME: "Use 1 to 63 characters of A-Z a-z 0-9 _ . -",
    PREFIX: 'Use up to 32 printable characters of ASCII, and none of " ; ` \\',
    SCHEMA: 'Use up to 63 printable characters of ASCII, and none of " ; ` \\',
    _TABLE: "Use 1 to 63 characters of A-Z a-z 0-9 _",
    _LISTEN: "Use HOST:PORT, like 127.0.0.1:9471",
}


class BrokerSection(msgspec.Struct, frozen=True, kw_only=True):
    """The broker's address and the credentials of this process."""

    url: str = "http://127.0.0.1:9470"
    #: The token from `qmq broker token add`; better set in the environment or a file than here.
    token: str = ""
    #: File that holds only the token; read again when the broker refuses the current one.
    token_file: str = ""
    #: PEM file of the authorities for the broker's certificate; by default those of the machine.
    ca_file: str = ""
    #: Client certificate and its key in PEM, for a broker that requires one.
    cert_file: str = ""
    key_file: str = ""

    def __repr__(self) -> str:
        return f"BrokerSection(url={self.url!r})"


class DatabaseSection(msgspec.Struct, frozen=True, kw_only=True):
    """One business database with an outbox."""

    #: Its name in logs and commands.
    name: _Name
    #: SQLAlchemy's URL.
    url: str
    #: Name of the environment variable that holds the password; empty when the URL is complete.
    password_env: str = ""
    #: File that holds only the password; read at each start.
    password_file: str = ""
    #: Schema of the outbox; empty for the connection's own.
    schema: _Schema = ""
    #: Prefix of the names of QMQ's tables.
    table_prefix: _Prefix = "qmq_"
    #: Most rows per second that each watchdog sends from this database; 0 for no limit.
    rows_per_s: _Rate = 0
    #: How long the watchdog keeps rows that were accepted; 0 deletes them at once.
    keep_sent_s: _KeptSeconds = 0.0
    #: How long ids stay in the inbox; 0: forever. Must be longer than the latest redelivery of a message.
    keep_inbox_s: _KeptSeconds = 0.0


class RegistrySection(msgspec.Struct, frozen=True, kw_only=True):
    """A table of further databases, read regularly while the watchdog runs; off without a `url`."""

    #: SQLAlchemy's URL of the database that has the table.
    url: str = ""
    password_env: str = ""
    password_file: str = ""
    schema: _Schema = ""
    table: _Table = "qmq_database"
    #: How often to read it.
    refresh_s: _Seconds = 5.0
    #: Directory of the files that a row may name as `password_file`; empty for none.
    password_directory: str = ""


class WatchdogSection(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the watchdog; the same for all databases."""

    #: Rows of one claim and one request.
    batch_rows: _Count = 1_000
    #: How long a claim lasts; after that another watchdog may take the rows.
    lease_ms: _Lease = 5_000
    #: A row is parked after this many refusals or invalid answers.
    max_attempts: _Count = 50
    #: A sweep ends after this many rows …
    sweep_rows_max: _Count = 100_000
    #: … or this many seconds, whichever comes first.
    sweep_s_max: _Seconds = 30.0
    #: After this long a database with rows left lets other databases go first (in the daemon).
    share_s: _Seconds = 1.0
    #: Wait between sweeps of a database that has nothing due …
    poll_s: _Seconds = 1.0
    #: … and that had nothing for this long …
    idle_after_s: _Seconds = 60.0
    #: … is this. With takeover (5 s) and a share it stays below the 10 s of promise W1.
    idle_poll_s: _Seconds = 3.0
    #: Longest wait between attempts while the broker or a database is unreachable.
    outage_s_max: _Seconds = 30.0
    #: Databases that are swept at the same time.
    workers: _Threads = 8
    #: Most further databases that hang or are slow; others of these wait.
    isolated_workers: _Threads = 24
    #: Open connections to all databases together; further ones are opened and closed for each sweep.
    connections_max: _Count = 200
    #: A database that does not accept a connection within this time is unreachable.
    connect_s_max: _Seconds = 5.0
    #: A statement that takes longer is aborted.
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
