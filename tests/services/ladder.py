"""From a kind of database to a server for the tests: the first rung that holds.

Rungs are functions tried in order. One returns the address of a server or raises `RungError` with the
reason why not; all reasons together are what a skipped test shows.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import make_url

from tests.services import packages
from tests.services.mysql import MysqlRecipe
from tests.services.postgresql import PostgresqlRecipe
from tests.services.private import PrivateServer, Recipe
from tests.services.run import TestRun
from tests.services.rungs import CHOSEN, RungError, is_allowed

Rung = Callable[[], str]

VARIABLES: Final = {"mysql": "QMQ_TEST_MYSQL_URL", "postgresql": "QMQ_TEST_POSTGRESQL_URL"}
RECIPES: Final = {"mysql": MysqlRecipe.find, "postgresql": PostgresqlRecipe.find}
PACKAGES: Final = {"mysql": "mariadb-server", "postgresql": "postgresql"}
#: Where a running server is looked for: as users who may get in without a password.
RUNNING: Final = {
    "mysql": (
        "mysql+pymysql://root@localhost/mysql?unix_socket=/run/mysqld/mysqld.sock",
        "mysql+pymysql://root@localhost/mysql?unix_socket=/tmp/mysql.sock",
        "mysql+pymysql://root@127.0.0.1:3306/mysql",
    ),
    "postgresql": (
        "postgresql+psycopg://postgres@/postgres?host=/run/postgresql",
        "postgresql+psycopg://postgres@/postgres?host=/tmp",
        "postgresql+psycopg://postgres@127.0.0.1:5432/postgres",
    ),
}
#: What the product needs, and `DROP DATABASE … WITH (FORCE)`.
_OLDEST: Final = {"mariadb": (10, 6), "mysql": (8, 0, 1), "postgresql": (13,)}
_CONNECT_S: Final = {"connect_timeout": 5}
_DOCKER_S_MAX: Final = 10
_REASON_CHARACTERS: Final = 160


class ServiceMissingError(Exception):
    """No rung holds; the text has the reason of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A server that the tests may make databases on."""

    kind: str
    #: For SQLAlchemy, of a database that is there already, as somebody who may make others.
    url: str
    #: Name of the rung that found it.
    rung: str


def climb(kind: str, rungs: Sequence[tuple[str, Rung]]) -> Service:
    """The service of the first rung that holds. Raises `ServiceMissingError`."""
    reasons = []
    for name, rung in rungs:
        try:
            return Service(kind=kind, url=rung(), rung=name)
        except RungError as error:
            reasons.append(f"{name}: {error}")
    raise ServiceMissingError(f"no {kind} for the tests. " + "; ".join(reasons))


def find_service(run: TestRun, kind: str) -> Service:
    """The one server of this kind that all workers of the run share; the first one climbs."""
    with run.alone():
        known = run.noted(f"service-{kind}")
    if known is None:
        with run.alone(f"climb-{kind}"):
            with run.alone():
                known = run.noted(f"service-{kind}")
            if known is None:
                known = _climb_and_note(run, kind)
    if "missing" in known:
        raise ServiceMissingError(known["missing"])
    return Service(kind=kind, url=known["url"], rung=known["rung"])


def rungs_of(run: TestRun, kind: str, environment: Mapping[str, str]) -> list[tuple[str, Rung]]:
    """The ladder, best rung first; of it those that `QMQ_TEST_RUNGS` names, when it is set."""
    rungs: list[tuple[str, Rung]] = [
        ("environment", lambda: from_environment(VARIABLES[kind], environment)),
        ("running", lambda: running(RUNNING[kind])),
        ("private", lambda: private(run, kind)),
        (packages.RUNG, lambda: by_apt(run, kind)),
        ("container", lambda: container(run, kind)),
    ]
    return [(name, rung if is_allowed(name, environment) else _left_out) for name, rung in rungs]


def _left_out() -> str:
    raise RungError(f"left out by {CHOSEN}")


def from_environment(variable: str, environment: Mapping[str, str]) -> str:
    """Whoever names a server wants that one: one that does not answer is an error, not a reason."""
    url = environment.get(variable, "")
    if not url:
        raise RungError(f"{variable} is not set")
    try:
        try_out(url)
    except (RungError, sa.exc.SQLAlchemyError) as error:
        raise AssertionError(f"{variable} names a server that is of no use: {error}") from error
    return url


def running(urls: Sequence[str]) -> str:
    """A server that runs at a usual place and lets us make databases."""
    reasons = []
    for url in urls:
        path = make_url(url).query.get("unix_socket")
        if path is not None and not _listens(str(path)):
            reasons.append(f"nobody listens at {path}")
            continue
        try:
            try_out(url)
        except RungError as error:
            reasons.append(str(error))
        except sa.exc.SQLAlchemyError as error:
            said = str(getattr(error, "orig", None) or error)
            reasons.append(" ".join(said.split())[:_REASON_CHARACTERS])
        else:
            return url
    raise RungError(" | ".join(reasons))


def try_out(url: str) -> None:
    """Make a database and drop it."""
    engine = sa.create_engine(url, connect_args=_CONNECT_S, isolation_level="AUTOCOMMIT")
    name = f"qmq_test_{os.urandom(6).hex()}"
    try:
        with engine.connect() as connection:
            _refuse_old(connection)
            connection.exec_driver_sql(f"CREATE DATABASE {name}")
            connection.exec_driver_sql(f"DROP DATABASE {name}")
    finally:
        engine.dispose()


def _refuse_old(connection: sa.Connection) -> None:
    dialect: Any = connection.dialect
    kind = "mariadb" if getattr(dialect, "is_mariadb", False) else dialect.name
    version = tuple(dialect.server_version_info)
    if version < _OLDEST[kind]:
        raise RungError(f"{kind} {'.'.join(map(str, version))} runs, which is too old")


def private(run: TestRun, kind: str) -> str:
    """A process of ours; the keeper ends it after the run."""
    server = PrivateServer(run, recipe(kind), is_detached=True)
    server.start()
    with run.alone():
        run.note(f"server-{kind}", {"process": server.process})
    return server.url()


def recipe(kind: str) -> Recipe:
    """How to run the server that is installed here. Raises `RungError` where none is."""
    found = RECIPES[kind]()
    if found is None:
        raise RungError(f"no {kind} server is installed")
    return found


def by_apt(run: TestRun, kind: str) -> str:
    """Install it as Debian and Ubuntu have it, then run a process of ours."""
    _install(kind)
    return private(run, kind)


def recipe_or_install(run: TestRun, kind: str) -> Recipe:
    """How to run the server that is installed here, now if it was not before."""
    with run.alone(f"climb-{kind}"):
        if RECIPES[kind]() is None and is_allowed(packages.RUNG, os.environ):
            _install(kind)
    return recipe(kind)


def _install(kind: str) -> None:
    packages.install(PACKAGES[kind], is_there=lambda: RECIPES[kind]() is not None)


def container(run: TestRun, kind: str) -> str:
    """A container; the keeper removes it after the run."""
    _ask_docker()
    if importlib.util.find_spec("testcontainers") is None:  # the demo goes without it
        raise RungError("testcontainers is not installed")
    os.environ["TESTCONTAINERS_RYUK_DISABLED"] = "true"  # it would end with this worker
    made: Any
    if kind == "mysql":
        from testcontainers.mysql import MySqlContainer

        made = MySqlContainer(
            "mariadb:10.11", username="root", root_password="qmq", dialect="pymysql"
        )
    else:
        from testcontainers.postgres import PostgresContainer

        made = PostgresContainer("postgres:16", username="qmq", password="qmq", driver="psycopg")
    try:
        made.start()
    except Exception as error:  # whatever the registry, the network or the image says
        raise RungError(f"docker answers, but: {error}"[:_REASON_CHARACTERS]) from error
    with run.alone():
        run.note(f"server-{kind}", {"container": made.get_wrapped_container().id})
    url: str = made.get_connection_url()
    return url


def _listens(path: str) -> bool:
    """Asked before PyMySQL is, which would leave its socket open."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def _ask_docker() -> None:
    if shutil.which("docker") is None:
        raise RungError("docker is not installed")
    try:
        asked = subprocess.run(["docker", "info"], capture_output=True, timeout=_DOCKER_S_MAX)
    except subprocess.TimeoutExpired:
        raise RungError("docker does not answer") from None
    if asked.returncode:
        raise RungError("docker does not answer")


def _climb_and_note(run: TestRun, kind: str) -> dict[str, Any]:
    try:
        found = climb(kind, rungs_of(run, kind, os.environ))
    except ServiceMissingError as error:
        facts = {"missing": str(error)}
    else:
        facts = {"url": found.url, "rung": found.rung}
    with run.alone():
        run.note(f"service-{kind}", facts)
    return facts
