"""How a private PostgreSQL is made, started and asked."""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path
from typing import Final

import psycopg

from tests.services.private import as_user

#: Debian keeps each version's programs apart, off the PATH.
_DEBIAN: Final = Path("/usr/lib/postgresql")
_USERS: Final = ("postgres", "nobody")


class PostgresqlRecipe:
    """See `private.Recipe`."""

    kind = "postgresql"

    def __init__(self, programs: Path) -> None:
        self._programs = programs

    @classmethod
    def find(cls) -> PostgresqlRecipe | None:
        """With the newest server that is installed here, if one is and may run."""
        folders = sorted(_DEBIAN.glob("*/bin"), key=lambda path: path.parent.name.zfill(4))
        found = [path for path in folders if (path / "postgres").exists()]
        if found:
            return cls(found[-1])
        server = shutil.which("postgres")
        return cls(Path(server).resolve().parent) if server else None

    def user(self) -> str | None:
        if os.geteuid() != 0:
            return None
        known = {entry.pw_name for entry in pwd.getpwall()}
        return next((name for name in _USERS if name in known), None)

    def make_template(self, data: Path) -> None:
        command = [str(self._programs / "initdb"), "--pgdata", str(data), "--no-sync"]
        options = ["--username=qmq", "--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8"]
        as_user(self.user(), [*command, *options])

    def command(self, data: Path, port: int) -> list[str]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "shared_buffers": "32MB",
            # In files of the data directory: others outlive a server that is killed.
            "dynamic_shared_memory_type": "mmap",
            "max_wal_size": "256MB",
            "max_connections": "300",
            "max_prepared_transactions": "20",
            "timezone": "UTC",
        }
        options = [part for item in settings.items() for part in ("-c", "=".join(item))]
        return [str(self._programs / "postgres"), "-D", str(data), "-p", str(port), *options]

    def url(self, port: int, database: str | None = None) -> str:
        return f"postgresql+psycopg://qmq@127.0.0.1:{port}/{database or 'postgres'}"

    def knock(self, port: int) -> None:
        address = f"host=127.0.0.1 port={port} user=qmq dbname=postgres connect_timeout=5"
        psycopg.connect(address).close()
