"""Databases and brokers for every test that asks: `a_database` for all three kinds, or one kind by its name.

A test gets a fresh database on the server that `tests/services` found. Without a server it is skipped,
with the reasons in the summary; where `CI` is set it fails.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.kit.asking import asks_for_spark
from tests.kit.broker_process import BrokerProcess
from tests.kit.company import put_back
from tests.kit.listening import left_behind
from tests.kit.parsing import parse_undisturbed
from tests.kit.surroundings import keep_files_in_memory, quieten
from tests.services.databases import KINDS, Database, Databases
from tests.services.ladder import ServiceMissingError
from tests.services.orphans import end_with_this_process
from tests.services.packages import find_or_install
from tests.services.private import PrivateServer
from tests.services.rungs import RungError

MakeDatabase = Callable[[str], Database]
#: Tests that share what is dear to make; two workers would make it twice.
_TOGETHER = (
    "tests/acceptance/test_flights.py",  # one run of the demo
    "tests/client/doctor/test_settings.py",  # servers of their own
    "tests/faults/test_database_clock.py",  # servers whose clocks are set
    "tests/tidy/",  # every source, parsed
    "tests/wire/test_compiled.py",  # one build of a wheel
)
#: Files below it are given out as files, except that those which ask for Spark share one.
_PIPELINE = "tests/pipeline/"
#: A set of two or more, and the address of an object, as they print themselves.
_CHANGING = re.compile(r"\{[^:{}]*, [^:{}]*\}| at 0x[0-9a-f]+")
MakeServer = Callable[..., PrivateServer]

parse_undisturbed()
quieten(os.environ)  # before other modules of tests are imported, which may read it
keep_files_in_memory(os.environ)
# An example may take as long as it likes on a busy machine; a failure prints how to repeat it.
settings.register_profile(
    "qmq",
    settings(),  # those of the machine: Hypothesis has others where CI is set
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("qmq")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    with put_back():
        yield


@pytest.fixture(scope="session")
def databases() -> Iterator[Databases]:
    made = Databases()
    yield made
    made.close()


@pytest.fixture
def make_database(databases: Databases, tmp_path: Path) -> Iterator[MakeDatabase]:
    """As many databases of any kind as a test wants."""
    made: list[Database] = []

    def make(kind: str) -> Database:
        made.append(databases.make(kind, tmp_path))
        return made[-1]

    yield make
    for database in made:
        database.drop()


@pytest.fixture
def make_private_server(databases: Databases) -> Iterator[MakeServer]:
    """Started servers of a test's own, to be killed and frozen, or with options of their own."""
    made: list[PrivateServer] = []

    def make(kind: str, **settings: Any) -> PrivateServer:
        made.append(databases.private_server(kind, **settings))
        made[-1].start()
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture(params=KINDS)
def a_database(request: pytest.FixtureRequest, make_database: MakeDatabase) -> Database:
    """One database of each kind in turn."""
    return make_database(request.param)


@pytest.fixture(params=["mysql", "postgresql"])
def a_server_database(request: pytest.FixtureRequest, make_database: MakeDatabase) -> Database:
    """One database of each kind that has a server, in turn."""
    return make_database(request.param)


@pytest.fixture
def sqlite_database(make_database: MakeDatabase) -> Database:
    return make_database("sqlite")


@pytest.fixture
def mysql_database(make_database: MakeDatabase) -> Database:
    return make_database("mysql")


@pytest.fixture
def postgresql_database(make_database: MakeDatabase) -> Database:
    return make_database("postgresql")


@pytest.fixture(scope="module")
def broker_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A real broker; the tests of a module share it."""
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as process:
        yield process


def require(package: str, find: Callable[[], Path | None]) -> Path:
    """A program or library; installed where that may be, else the test is skipped or failed."""
    return find_or_install(package, find)


def require_program(name: str, package: str) -> str:
    """The same for a program on the path."""
    return str(require(package, lambda: _on_path(name)))


def _on_path(name: str) -> Path | None:
    found = shutil.which(name)
    return None if found is None else Path(found)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None]:
    """Whatever a fixture needs and cannot have: the tests that ask for it are not run."""
    with _without_what_is_missing():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """The same for what a test asks for itself."""
    with _without_what_is_missing():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    """A test must not have others go another way, of SQLAlchemy and of the outbox."""
    yield
    if names := left_behind():
        pytest.fail(
            f"all engines are listened to still ({', '.join(names)}): use tests.kit.listening",
            pytrace=False,
        )


@contextmanager
def _without_what_is_missing() -> Iterator[None]:
    try:
        yield
    except ServiceMissingError as error:
        give_up(str(error), os.environ)
    except RungError as error:
        give_up(f"something is missing for the tests. {error}", os.environ)


def give_up(reason: str, environment: Mapping[str, str]) -> NoReturn:
    """Skip, or fail where nobody would read of a skip."""
    if environment.get("CI"):
        pytest.fail(f"{reason} (CI is set: a test may not be skipped for this)", pytrace=False)
    pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing is thrown away while tests are collected: to look for garbage would take longer than all else."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What is there to stay, all tests of the house, is left out of each collection of garbage."""
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """Brokers, consumers and watchdogs of a worker that is killed go with it."""
    end_with_this_process()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly what was not tested."""
    reasons = {
        report.longrepr[2]
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple) and " for the tests. " in report.longrepr[2]
    }
    if reasons:
        terminalreporter.section("NOT TESTED for want of a server", red=True)
        for reason in sorted(reasons):
            terminalreporter.line(reason)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse names that another process would write in another way: its workers would not start."""
    odd = [item.nodeid for item in items if _CHANGING.search(item.nodeid)]
    if odd:
        raise pytest.UsageError(
            "the order of a set and an address differ from process to process, so no name of a test "
            f"may have them; give `ids` to {', '.join(odd)}"
        )


class Together(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives tests to workers one by one; those of `_TOGETHER` all to one, as those that ask for Spark."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(_PIPELINE):
            file = nodeid.partition("::")[0]
            return _PIPELINE if asks_for_spark(self.config.rootpath / file) else file
        return next((path for path in _TOGETHER if nodeid.startswith(path)), nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Together | None:
    """With `--dist loadgroup`, as dev.py has it; xdist's own groups need another pytest."""
    return Together(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much is run, and which random program."""
    parser.addoption("--release", action="store_true", help="as many trials as before a release")
    parser.addoption("--seed", type=int, help="only the random program of this seed")
