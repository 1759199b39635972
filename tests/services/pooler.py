"""PgBouncer in front of a PostgreSQL, in transaction pooling: each transaction may have another session."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Final

import psycopg
import sqlalchemy as sa

from tests.kit.ports import free_port
from tests.kit.waiting import wait_for
from tests.services import launch
from tests.services.databases import Databases
from tests.services.packages import find_or_install
from tests.services.postgresql import PostgresqlRecipe

PACKAGE: Final = "pgbouncer"
#: Few, so that clients really share sessions of the server.
SERVER_SESSIONS: Final = 2
READY_S_MAX: Final = 30.0
_STOP_S_MAX: Final = 30.0


def find_program() -> Path | None:
    """Debian keeps it where root's PATH leads."""
    found = shutil.which(PACKAGE, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))
    return Path(found) if found else None


class Pooler:
    """Started at once in front of the server of `url`, ended by `close`.

    Raises `RungError` where it cannot be had.
    """

    def __init__(self, databases: Databases, url: str, *, ignored: str = "") -> None:
        program = find_or_install(PACKAGE, find_program)
        user = PostgresqlRecipe(program.parent).user()  # it refuses to run as root
        self._folder = databases.run.new_folder(PACKAGE)
        if user is not None:
            shutil.chown(self._folder, user)
        self.port = free_port()
        self._url = sa.make_url(url)
        settings = self._folder / "pgbouncer.ini"
        settings.write_text(self._settings(ignored))
        line = launch.command_line([str(program), str(settings)], user=user, is_detached=False)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(line, stdout=log, stderr=log)
        wait_for(self._is_ready, self.log, within_s=READY_S_MAX)

    @property
    def url(self) -> str:
        """Of the same database, through the pooler."""
        return self._url.set(port=self.port).render_as_string(hide_password=False)

    def log(self) -> str:
        """What it said."""
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        """End it, and remove its files."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(_STOP_S_MAX)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def _settings(self, ignored: str) -> str:
        url = self._url
        login = f"user={url.username}" + (f" password={url.password}" if url.password else "")
        return f"""\
[databases]
{url.database} = host={url.host} port={url.port or 5432} dbname={url.database} {login}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self.port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {SERVER_SESSIONS}
ignore_startup_parameters = {ignored}
"""

    def _is_ready(self) -> bool:
        if self._process.poll() is not None:
            raise AssertionError(f"the pooler ended at once:\n{self.log()}")
        try:
            psycopg.connect(
                host="127.0.0.1",
                port=self.port,
                user=self._url.username,
                dbname=self._url.database,
                connect_timeout=5,
            ).close()
        except psycopg.OperationalError:
            return False
        return True
