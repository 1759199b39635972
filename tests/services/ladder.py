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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import make_url

from tests.kit.surroundings import for_packages
from tests.services.mysql import MysqlRecipe
from tests.services.postgresql import PostgresqlRecipe
from tests.services.private import PrivateServer, Recipe
from tests.services.run import TestRun

Rung = Callable[[], str]

VARIABLES: Final = {"mysql": "QMQ_TEST_MYSQL_URL", "postgresql": "QMQ_TEST_POSTGRESQL_URL"}
#: Names of rungs with commas between them, such as `environment,private`.
CHOSEN: Final = "QMQ_TEST_RUNGS"
RECIPES: Final = {"mysql": MysqlRecipe.find, "postgresql": PostgresqlRecipe.find}
PACKAGES: Final = {"mysql": "mariadb-server", "postgresql": "postgresql", "chromium": "chromium"}
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
_APT_S_MAX: Final = 600
_DOCKER_S_MAX: Final = 10
_REASON_CHARACTERS: Final = 160


class RungError(Exception):
    """This rung does not hold; the text says why."""


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
        ("apt-get", lambda: by_apt(run, kind)),
        ("container", lambda: container(run, kind)),
    ]
    return [(name, rung if is_allowed(name, environment) else _left_out) for name, rung in rungs]


def is_allowed(name: str, environment: Mapping[str, str]) -> bool:
    """Whether this rung may be tried."""
    chosen = environment.get(CHOSEN, "")
    return not chosen or name in chosen.split(",")


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
            reasons.append(" ".join(str(error).split())[:_REASON_CHARACTERS])
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
    install(kind)
    return private(run, kind)


def recipe_or_install(run: TestRun, kind: str) -> Recipe:
    """How to run the server that is installed here, now if it was not before."""
    with run.alone(f"climb-{kind}"):
        if RECIPES[kind]() is None and is_allowed("apt-get", os.environ):
            install(kind)
    return recipe(kind)


def install(kind: str) -> None:
    """By apt-get, with no service started. Raises `RungError` where that cannot be."""
    install_package(PACKAGES[kind], f"{kind} server")


def install_package(package: str, what: str) -> None:
    """The same for any package of the distribution."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RungError(f"no {what} is installed, and to install it needs root and apt-get")
    with _no_services():
        for line in (["update"], ["install", "-y", "--no-install-recommends", package]):
            _apt(line)


def tool(run: TestRun, package: str, find: Callable[[], Path | None]) -> Path:
    """A program or library that tests use beside the servers; installed now if it was not before.

    Raises `RungError` where it cannot be had.
    """
    with run.alone(f"climb-{package}"):
        if find() is None and is_allowed("apt-get", os.environ):
            install_package(package, package)
    if (found := find()) is None:
        raise RungError(f"{package} is not installed")
    return found


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


def _apt(line: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            ["apt-get", "-q", *line],
            env=for_packages(os.environ),
            capture_output=True,
            text=True,
            timeout=_APT_S_MAX,
        )
    except subprocess.TimeoutExpired:
        raise RungError(f"apt-get {line[0]} took more than {_APT_S_MAX} s") from None
    if done.returncode:
        said = " ".join(done.stderr.split())[-_REASON_CHARACTERS:]
        raise RungError(f"apt-get {line[0]} failed: {said}")


@contextmanager
def _no_services(policy: Path = Path("/usr/sbin/policy-rc.d")) -> Iterator[None]:
    """Debian starts a server as soon as it is installed; this file says no, for a while."""
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink(missing_ok=True)


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
