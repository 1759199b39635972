"""How a private MariaDB or MySQL is made, started and asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pymysql

from tests.services.private import as_user

#: Names the server's program, where several are installed or the one that is meant is on no PATH.
CHOSEN: Final = "QMQ_TEST_MYSQL_SERVER"
_SERVERS: Final = ("mariadbd", "mysqld")
#: Option of PyMySQL. Without it each connection reads the certificates of all authorities, which takes
#: ten times the processor time of all else that a connection costs, and then finds that there is no TLS.
WITHOUT_TLS: Final = "ssl_disabled"
_INSTALLERS: Final = ("mariadb-install-db", "mysql_install_db")
#: Where distributions keep servers that are on nobody's PATH.
_PLACES: Final = ("/usr/sbin", "/usr/local/sbin", "/usr/libexec", "/usr/local/mysql/bin")
#: Its second protocol, at a port that all servers of this machine share; a folder of the package for
#: its service, which it would not start without and only its service's user may enter; names that
#: change by version.
_AS_MYSQL: Final = (
    "--loose-mysqlx=OFF",
    "--secure-file-priv=NULL",
    "--loose-innodb-redo-log-capacity=32M",
)
#: Run at every start; a user for TCP from any name of this machine.
_USERS: Final = (
    "CREATE USER IF NOT EXISTS 'qmq'@'%';\n"
    "GRANT ALL PRIVILEGES ON *.* TO 'qmq'@'%' WITH GRANT OPTION;\n"
)


class MysqlRecipe:
    """See `private.Recipe`."""

    kind = "mysql"

    def __init__(self, server: str) -> None:
        self._server = server
        told = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
        self._is_mariadb = "MariaDB" in told.stdout

    @classmethod
    def find(cls) -> MysqlRecipe | None:
        """With the server that `QMQ_TEST_MYSQL_SERVER` names, or one that is installed here, if one is."""
        if chosen := os.environ.get(CHOSEN):
            if (program := shutil.which(chosen)) is None:
                raise AssertionError(f"{CHOSEN} names {chosen}, which is no program")
            return cls(program)
        path = os.pathsep.join([os.environ.get("PATH", ""), *_PLACES])
        for name in _SERVERS:
            if found := shutil.which(name, path=path):
                return cls(found)
        return None

    def user(self) -> str | None:
        return None

    def make_template(self, data: Path) -> None:
        if self._is_mariadb:
            small = ["--innodb-log-file-size=16M", _own_scratch(data)]
            for name in _INSTALLERS:
                if installer := shutil.which(name):
                    options = ["--no-defaults", f"--datadir={data}", "--skip-test-db", *small]
                    method = "--auth-root-authentication-method=normal"
                    as_user(None, [installer, *options, method, *self._as_root()])
                    return
        options = [
            "--no-defaults",
            "--initialize-insecure",
            f"--datadir={data}",
            _own_scratch(data),
        ]
        as_user(None, [self._server, *options, *self._as_root()])

    def command(self, data: Path, port: int) -> list[str]:
        folder = data.parent
        users = folder / "users.sql"
        users.write_text(_USERS)
        return [
            self._server,
            "--no-defaults",
            f"--datadir={data}",
            f"--socket={folder / 's'}",
            f"--pid-file={folder / 'pid'}",
            _own_scratch(data),
            "--bind-address=127.0.0.1",
            f"--port={port}",
            f"--init-file={users}",
            "--skip-name-resolve",
            "--default-time-zone=+00:00",  # not this machine's: the doctor has a word to say of others
            "--innodb-flush-log-at-trx-commit=1",
            "--innodb-buffer-pool-size=64M",
            "--max-connections=300",
            *(["--innodb-log-file-size=16M"] if self._is_mariadb else _AS_MYSQL),
            *self._as_root(),
        ]

    def url(self, port: int, database: str | None = None) -> str:
        query = f"charset=utf8mb4&{WITHOUT_TLS}=true"
        return f"mysql+pymysql://qmq@127.0.0.1:{port}/{database or 'mysql'}?{query}"

    def knock(self, port: int) -> None:
        # The port may be another server's: only ours knows this user.
        pymysql.connect(
            host="127.0.0.1", port=port, user="qmq", connect_timeout=5, ssl_disabled=True
        ).close()

    def _as_root(self) -> list[str]:
        # It refuses to run as root unless told so.
        return ["--user=root"] if os.geteuid() == 0 else []


def _own_scratch(data: Path) -> str:
    """The option for a folder of temporary tables that no other server has.

    A server that starts removes all such tables from its folder, those of a running one too, and
    MariaDB crashes when a table that it has just made is gone.
    """
    folder = data.with_name(f"{data.name}-scratch")
    folder.mkdir(exist_ok=True)
    return f"--tmpdir={folder}"
