"""The rungs in their order, skip or fail, and what the tests find at the top."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from tests.conftest import MakeDatabase, give_up
from tests.services.databases import Database, Databases
from tests.services.ladder import (
    ServiceMissingError,
    climb,
    from_environment,
    rungs_of,
    running,
)
from tests.services.mysql import CHOSEN as CHOSEN_SERVER
from tests.services.mysql import MysqlRecipe
from tests.services.packages import find_or_install, lock_path, no_services
from tests.services.run import TestRun
from tests.services.rungs import CHOSEN, RungError

ROOT = Path(__file__).resolve().parents[2]


def refuses(reason: str) -> str:
    raise RungError(reason)


def test_the_first_rung_that_holds_is_taken_and_no_later_one_is_tried() -> None:
    rungs = [
        ("low", lambda: refuses("rotten")),
        ("middle", lambda: "here"),
        ("high", lambda: pytest.fail("it was tried")),
    ]
    found = climb("mysql", rungs)
    assert (found.url, found.rung) == ("here", "middle")


def test_without_a_rung_every_reason_is_reported() -> None:
    rungs = [("low", lambda: refuses("rotten")), ("high", lambda: refuses("gone"))]
    with pytest.raises(
        ServiceMissingError, match=r"no mysql for the tests\. low: rotten; high: gone"
    ):
        climb("mysql", rungs)


def test_the_ladder_has_its_rungs_in_order(databases: Databases) -> None:
    names = [name for name, _ in rungs_of(databases.run, "postgresql", {})]
    assert names == ["environment", "running", "private", "apt-get", "container"]


def test_a_variable_that_is_not_set_is_a_reason() -> None:
    with pytest.raises(RungError, match="QMQ_TEST_MYSQL_URL is not set"):
        from_environment("QMQ_TEST_MYSQL_URL", {})


def test_a_server_that_the_environment_names_must_answer() -> None:
    variable = "QMQ_TEST_POSTGRESQL_URL"
    address = "postgresql+psycopg://nobody@127.0.0.1:1/none"
    with pytest.raises(AssertionError, match=variable):
        from_environment(variable, {variable: address})


def test_a_server_that_the_environment_names_is_used(databases: Databases) -> None:
    address = databases.service("mysql").url
    assert from_environment("QMQ_TEST_MYSQL_URL", {"QMQ_TEST_MYSQL_URL": address}) == address


def test_the_program_of_a_mysql_of_our_own_may_be_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "some-mysqld"
    program.write_text("#!/bin/sh\necho some-mysqld Ver 8.0\n")
    program.chmod(0o755)
    monkeypatch.setenv(CHOSEN_SERVER, str(program))
    found = MysqlRecipe.find()
    assert found is not None
    assert found.command(tmp_path / "data", 1)[0] == str(program)
    monkeypatch.setenv(CHOSEN_SERVER, str(tmp_path / "none"))
    with pytest.raises(AssertionError, match=f"{CHOSEN_SERVER} names .*none, which is no program"):
        MysqlRecipe.find()


def test_of_the_usual_places_the_first_that_lets_us_in_is_taken(databases: Databases) -> None:
    closed, open_ = "mysql+pymysql://root@127.0.0.1:1/mysql", databases.service("mysql").url
    absent = "mysql+pymysql://root@localhost/mysql?unix_socket=/no/socket"
    assert running([absent, closed, open_]) == open_
    with pytest.raises(RungError, match=r"nobody listens at /no/socket \| .*Can't connect"):
        running([absent, closed])


def test_without_a_server_a_test_is_skipped_and_in_ci_it_fails() -> None:
    with pytest.raises(pytest.skip.Exception, match="no mysql"):
        give_up("no mysql for the tests. a: b", {})
    with pytest.raises(pytest.fail.Exception, match="CI is set"):
        give_up("no mysql for the tests. a: b", {"CI": "1"})


def test_a_rung_may_be_left_out(databases: Databases) -> None:
    rungs = rungs_of(databases.run, "mysql", {"QMQ_TEST_RUNGS": "environment,running"})
    reasons = {}
    for name, rung in rungs[2:]:
        with pytest.raises(RungError) as caught:
            rung()
        reasons[name] = str(caught.value)
    assert reasons == dict.fromkeys(
        ["private", "apt-get", "container"], "left out by QMQ_TEST_RUNGS"
    )


ASKING = """
import pytest
from tests.services.rungs import RungError

def test_asks(mysql_database): pass

@pytest.fixture(scope="module")
def server_of_a_module(databases):
    raise RungError("no server of a module")

def test_asks_by_a_fixture_of_its_own(server_of_a_module): pass

def test_asks_by_itself():
    raise RungError("no server of a test")
"""


@pytest.mark.parametrize("ci", ["", "1"])
def test_a_run_says_loudly_what_was_not_tested(tmp_path: Path, ci: str) -> None:
    """In a process of its own, which has no rung to stand on."""
    (tmp_path / "test_asking.py").write_text(ASKING)
    environment = {**os.environ, "QMQ_TEST_RUNGS": "environment", "CI": ci}
    for name in ("QMQ_TEST_MYSQL_URL", "PYTEST_XDIST_TESTRUNUID", "PYTEST_XDIST_WORKER"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(
        [*command, "-p", "tests.conftest", f"--rootdir={tmp_path}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert "environment: QMQ_TEST_MYSQL_URL is not set; running: left out" in done.stdout
    assert "no server of a module" in done.stdout
    assert "no server of a test" in done.stdout
    assert ("1 failed, 2 errors" if ci else "3 skipped") in done.stdout
    assert ("NOT TESTED for want of a server" in done.stdout) == (not ci)
    assert done.returncode == (1 if ci else 0), done.stdout


def test_no_service_starts_while_packages_are_installed(tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    with no_services(policy):
        assert os.access(policy, os.X_OK)
        assert "exit 101" in policy.read_text()
    assert not policy.exists()
    policy.write_text("the administrator's own")
    with no_services(policy):
        assert policy.read_text() == "the administrator's own"
    assert policy.exists()


def test_what_is_installed_is_taken_as_it_is(tmp_path: Path) -> None:
    assert find_or_install("no-such-package", lambda: tmp_path) == tmp_path


def test_a_package_that_may_not_be_installed_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHOSEN, "environment")
    with pytest.raises(RungError, match="no-such-package is not installed"):
        find_or_install("no-such-package", lambda: None)


def test_what_another_run_installed_meanwhile_is_not_installed_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(CHOSEN, raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    (tmp_path / "apt-get").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    # The lock of the machine is root's: left behind by somebody else, it would shut out all others.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    looks: list[int] = []

    def find() -> Path | None:
        looks.append(1)
        return tmp_path if len(looks) > 1 else None

    assert find_or_install("no-such-package", find) == tmp_path


def test_what_another_run_is_installing_is_not_taken_before_it_is_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    library = tmp_path / "library"

    def find() -> Path | None:
        return tmp_path if library.exists() else pytest.fail("half of it")

    with lock_path().open("a") as lock, ThreadPoolExecutor() as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = pool.submit(find_or_install, "no-such-package", find)
        assert not wait([found], timeout=0.1).done
        library.touch()
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert found.result() == tmp_path


def test_each_test_has_an_empty_database_of_its_own(make_database: MakeDatabase) -> None:
    for kind in ("sqlite", "mysql", "postgresql"):
        one, other = make_database(kind), make_database(kind)
        with one.engine().begin() as connection:
            connection.exec_driver_sql("CREATE TABLE thing (id INTEGER)")
        assert sa.inspect(one.engine()).get_table_names() == ["thing"]
        assert sa.inspect(other.engine()).get_table_names() == []


def test_a_loop_reaches_the_same_database(a_database: Database) -> None:
    with a_database.engine().begin() as connection:
        connection.exec_driver_sql("CREATE TABLE thing (id INTEGER)")
        connection.exec_driver_sql("INSERT INTO thing VALUES (7)")

    async def read() -> object:
        engine = create_async_engine(a_database.async_url)
        async with engine.connect() as connection:
            found = await connection.scalar(sa.text("SELECT id FROM thing"))
        await engine.dispose()
        return found

    assert asyncio.run(read()) == 7


def test_a_database_is_dropped_under_an_open_transaction(
    databases: Databases, a_server_database: Database, tmp_path: Path
) -> None:
    database = databases.make(a_server_database.kind, tmp_path)
    engine = sa.create_engine(database.url)
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE TABLE thing (id INTEGER)")
        connection.commit()
        connection.exec_driver_sql("SELECT * FROM thing")
        database.drop()
        connection.invalidate()
    engine.dispose()
    with pytest.raises(sa.exc.OperationalError, match=database.name):
        sa.create_engine(database.url, poolclass=sa.pool.NullPool).connect()


def test_another_run_has_a_folder_and_a_keeper_of_its_own(databases: Databases) -> None:
    other = TestRun("other-run")
    try:
        assert other.folder != databases.run.folder
        with other.alone():
            assert other.noted("keeper")
    finally:
        other.close()
