"""A private server whose wall clock a test sets while it runs, as people and NTP do.

By libfaketime, which reads the difference from a file each time the server asks for the time. What
waits and measures goes by the monotonic clock and is left alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import sqlalchemy as sa

from qmq_client.outbox.database.dialect import dialect_of
from tests.kit.waiting import wait_for
from tests.services.databases import Databases
from tests.services.packages import find_or_install
from tests.services.private import PrivateServer

#: Where the kernel shows what processes share.
_SHARED: Final = Path("/dev/shm")
PACKAGE: Final = "libfaketime"
#: How far a clock that was set may seem to be from where it was set to: the time it takes to look.
_NEAR_S: Final = 30.0


def find_library() -> Path | None:
    """The library for programs with threads."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    return found[0] if found else None


def remove_what_ended_ones_shared(folder: Path = _SHARED) -> None:
    """What the library shares among processes outlives one that is killed.

    Other workers, and other runs on this machine, have their own there, which they go on using.
    """
    for name in ("faketime_shm_", "sem.faketime_sem_"):
        for path in folder.glob(f"{name}*"):
            if not Path("/proc", path.name.removeprefix(name)).exists():
                path.unlink(missing_ok=True)


class ShiftedServer:
    """Started by `start`, ended by `close`; `shift` sets its clock. Raises `RungError` without one."""

    def __init__(self, databases: Databases, kind: str) -> None:
        library = find_or_install(PACKAGE, find_library)
        self._file = databases.run.new_folder("clock") / "difference"
        self._write(0)
        self.server: PrivateServer = databases.private_server(
            kind,
            environment={
                "LD_PRELOAD": str(library),
                "FAKETIME_TIMESTAMP_FILE": str(self._file),
                "FAKETIME_NO_CACHE": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            },
        )

    def start(self) -> None:
        """With the right time."""
        self.server.start()
        self._engine = sa.create_engine(self.server.url(), isolation_level="AUTOCOMMIT")

    def shift(self, seconds: int) -> None:
        """Set the clock so far ahead of the true time, or behind it; returns when it shows."""
        before_s, was = self._now_s(), self._difference
        self._write(seconds)
        moved_s = seconds - was
        wait_for(lambda: abs(self._now_s() - before_s - moved_s) < _NEAR_S, "the clock stays")

    def close(self) -> None:
        """Stop the server and remove its data."""
        self._engine.dispose()
        self.server.stop()
        self.server.close()
        remove_what_ended_ones_shared()

    def _now_s(self) -> float:
        with self._engine.connect() as connection:
            now_ms = dialect_of(self._engine).now_ms
            return float(connection.exec_driver_sql(f"SELECT {now_ms}").scalar_one()) / 1000

    def _write(self, seconds: int) -> None:
        self._difference = seconds
        made = self._file.with_suffix(".new")
        made.write_text(f"{seconds:+d}s\n")
        made.chmod(0o644)  # the server may run as another user
        made.replace(self._file)
