"""SQLite in the played world: its driver gives turns back, waits by played time, and fails on demand.

The database and its locks are the real ones. Played are the clock that its statements read, the waits
for a lock (many connections, one thread), and faults: a statement that fails, a COMMIT whose answer is
lost, a process that dies between two statements or inside a transaction.

Triggers on the outbox tell of every change of a row and who made it, as part of the transaction:
`rows.py` judges by that who owned which row, without knowing how the product writes its statements.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.outbox.table import DEFAULT_TABLES
from tests.simulation.rows import RowChange
from tests.simulation.scheduler import MS, PlayedClock, Process, Scheduler

#: Days since noon of 24 November 4714 BC at 1970, which is what SQLite's clock counts from.
_EPOCH_DAYS: Final = 2440587.5
_DAY_MS: Final = 86_400_000.0
_BUSY: Final = "PRAGMA busy_timeout"
#: What the driver itself waits for a lock unless told otherwise.
_PATIENCE_MS: Final = 5_000
_LOOK_AGAIN_US: Final = 20 * MS
_BUSY_SNAPSHOT: Final = 517
_SCHEMA: Final = """
CREATE TABLE business (label TEXT NOT NULL);
CREATE TABLE effect (consumer_group TEXT NOT NULL, message_id TEXT NOT NULL, label TEXT NOT NULL);
"""
_TRIGGER: Final = """
CREATE TRIGGER told_{event} AFTER {event} ON {table} BEGIN SELECT told(
  '{event}', {row}.message_id, {old}, {new}); END;
"""
_COLUMNS: Final = ("token", "due_at_ms", "state")


class Slot:
    """One engine to the world's database, used by one process after the other."""

    def __init__(self, name: str, path: Callable[[], Path]) -> None:
        #: Who has it now; None for nobody, and then nothing is played.
        self.process: Process | None = None
        self.played: Played | None = None
        self._path = path
        self._connections: list[PlayedConnection] = []
        self.engine = sa.create_engine(f"sqlite:///{name}", creator=self._connect)

    def _connect(self) -> PlayedConnection:
        connection = PlayedConnection(self, self._path(), timeout=0)
        self._connections.append(connection)
        return connection

    def take(self, process: Process, played: Played) -> sa.Engine:
        """Give the engine to a process that begins."""
        self.process, self.played = process, played
        return self.engine

    def release(self) -> None:
        """Close all connections, as the operating system does for a process that ended."""
        self.process = self.played = None
        self.engine.dispose()
        for connection in self._connections:  # those of pools that the product made beside it, too
            connection.close()
        self._connections.clear()


class Played:
    """The database of one world: its clock, its faults, and what its triggers told."""

    def __init__(self, scheduler: Scheduler, tell: Callable[[Process, RowChange], None]) -> None:
        self.scheduler = scheduler
        self.clock = PlayedClock(scheduler)
        self.tell = tell
        #: Chances of BEGIN to fail, and of COMMIT to end in an error, whether it was done or not.
        self.fails = 0.0
        self.spoils_commits = 0.0

    def draw(self, chance: float) -> bool:
        """Whether something of this chance happens now."""
        return chance > 0 and self.scheduler.rng.random() < chance

    def commit_error(self) -> sqlite3.Error:
        """What is seen of a COMMIT that failed, or whose answer was lost: nobody can tell."""
        if self.scheduler.rng.random() < 0.5:
            return sqlite3.OperationalError("trouble in COMMIT (played)")
        # What SQLAlchemy takes for a lost connection.
        return sqlite3.ProgrammingError("Cannot operate on a closed database. (played)")


class PlayedCursor(sqlite3.Cursor):
    """A cursor whose statements are points of the process."""

    def execute(self, sql: str, parameters: Any = ()) -> PlayedCursor:
        self._run(super().execute, sql, parameters)
        return self

    def executemany(self, sql: str, parameters: Any) -> PlayedCursor:
        self._run(super().executemany, sql, parameters)
        return self

    def _run(self, call: Callable[..., Any], sql: str, parameters: Any) -> None:
        connection = self.connection
        assert isinstance(connection, PlayedConnection)
        connection.play(call, sql, parameters)


class PlayedConnection(sqlite3.Connection):
    """A connection that plays; see the module."""

    def __init__(self, slot: Slot, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._slot = slot
        self._patience_ms = _PATIENCE_MS
        self._changes: list[RowChange] = []
        super().execute("PRAGMA synchronous = OFF")
        self.create_function("julianday", 1, self._julian_day)
        self.create_function("told", 8, self._told)

    def cursor(self, factory: Any = PlayedCursor) -> Any:
        return super().cursor(PlayedCursor)

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        # On to a cursor, where it is played.
        cursor: sqlite3.Cursor = self.cursor().execute(sql, parameters)
        return cursor

    def play(self, call: Callable[..., Any], sql: str, parameters: Any) -> None:
        """One statement as the process sees it."""
        process, played = self._slot.process, self._slot.played
        if process is None or played is None or sql.startswith("PRAGMA"):
            if sql.startswith(_BUSY):
                sql = f"{_BUSY} = 0"  # waiting is played
            call(sql, parameters)
            return
        process.check()
        if sql.startswith("BEGIN"):
            process.sleep(played.scheduler.rng.randrange(300), "begins a transaction")
            if played.draw(played.fails):
                raise sqlite3.OperationalError("the database is away (played)")
        self._patiently(lambda: call(sql, parameters), process)

    def commit(self) -> None:
        process, played = self._slot.process, self._slot.played
        if process is None or played is None or not self.in_transaction:
            super().commit()
            return
        process.sleep(played.scheduler.rng.randrange(200), "commits")
        is_spoilt = played.draw(played.spoils_commits)
        if is_spoilt and played.draw(0.5):
            raise played.commit_error()
        self._patiently(super().commit, process)
        changes, self._changes = self._changes, []
        for change in changes:
            played.tell(process, change)
        process.check()
        if is_spoilt:
            raise played.commit_error()

    def rollback(self) -> None:
        self._changes.clear()
        super().rollback()

    def _patiently(self, call: Callable[[], object], process: Process) -> None:
        """Wait for a lock as SQLite does, by played time."""
        waited_us = 0
        while True:
            try:
                call()
            except sqlite3.OperationalError as error:
                is_hopeless = error.sqlite_errorcode == _BUSY_SNAPSHOT
                is_locked = error.sqlite_errorname.startswith("SQLITE_BUSY")
                if not is_locked or is_hopeless or waited_us >= self._patience_ms * MS:
                    raise
                process.sleep(_LOOK_AGAIN_US, "waits for a lock")
                waited_us += _LOOK_AGAIN_US
            else:
                return

    def _julian_day(self, _: str) -> float:
        played = self._slot.played
        now_ms = 0 if played is None else played.clock.now_ms()
        return now_ms / _DAY_MS + _EPOCH_DAYS

    def _told(self, event: str, message_id: bytes, *values: Any) -> None:
        if self._slot.played is not None:
            now_ms = self._slot.played.clock.now_ms()
            self._changes.append(RowChange(event, message_id, values[:3], values[3:], now_ms))


class Databases:
    """A database for each world; the engines stay, because they are costly and files are not."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._template = directory / "template.db"
        self._make_template()
        self._slots: dict[str, Slot] = {}
        self._reader: sqlite3.Connection | None = None
        self._number = 0
        self.path = self._template

    def slot(self, role: str) -> Slot:
        """The engine for this role: what the product does to an engine stays with it."""
        slot = self._slots.get(role)
        if slot is None:
            slot = self._slots[role] = Slot(role, lambda: self.path)
            slot.engine.connect().close()  # the first one of an engine asks for more than others
        return slot

    def empty(self) -> None:
        """Begin anew with a file of its own: what still holds the last one does no harm."""
        self._release()
        for path in self._directory.glob("world-*"):
            path.unlink()
        self._number += 1
        self.path = self._directory / f"world-{self._number}.db"
        shutil.copyfile(self._template, self.path)

    def close(self) -> None:
        """Give everything back."""
        self._release()

    def read(self, query: str) -> list[tuple[Any, ...]]:
        """What is committed now."""
        if self._reader is None:  # kept: a look at a world is far cheaper than a connection
            self._reader = sqlite3.connect(self.path)
            self._reader.execute("PRAGMA synchronous = OFF")  # it may be the last one to close
        return self._reader.execute(query).fetchall()

    def _release(self) -> None:
        for slot in self._slots.values():
            slot.release()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _make_template(self) -> None:
        engine = sa.create_engine(f"sqlite:///{self._template}")
        DEFAULT_TABLES.outbox.metadata.create_all(engine)
        engine.dispose()
        connection = sqlite3.connect(self._template)
        connection.execute("PRAGMA journal_mode = WAL")  # remembered by the file
        connection.executescript(_SCHEMA)
        for event, row in (("INSERT", "new"), ("UPDATE", "new"), ("DELETE", "old")):
            nothing = ", ".join("NULL" for _ in _COLUMNS)
            old, new = (", ".join(f"{side}.{name}" for name in _COLUMNS) for side in ("old", "new"))
            connection.executescript(
                _TRIGGER.format(
                    event=event,
                    table=DEFAULT_TABLES.outbox.name,
                    row=row,
                    old=nothing if event == "INSERT" else old,
                    new=nothing if event == "DELETE" else new,
                )
            )
        connection.close()
