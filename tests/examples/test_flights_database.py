"""What the demo does differently on each kind of database."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import sqlalchemy as sa

from examples.flights import __main__ as demo
from examples.flights.consumers import PLACE, add_up
from examples.flights.database import open_databases, open_engine, read, version_of
from examples.flights.models import TallyBase
from tests.services.databases import Database
from tests.services.ladder import VARIABLES
from tests.services.mysql import CHOSEN as CHOSEN_SERVER
from tests.services.run import TestRun
from tests.services.rungs import CHOSEN as CHOSEN_RUNGS

ROW = dict(zip(PLACE, ("departed", "JFK", "UA", "2013-01-01"), strict=True))
QUERY = "SELECT count FROM tallies"


def test_a_tally_that_is_there_is_added_to_and_the_judge_reads_what_is_committed(
    a_database: Database,
) -> None:
    engine = open_engine(a_database.url, TallyBase)
    with engine.begin() as connection:
        connection.execute(add_up(engine.dialect.name), [{**ROW, "count": 3}])
    with engine.connect() as connection:
        connection.execute(add_up(engine.dialect.name), [{**ROW, "count": 4}])
        assert [tuple(row) for row in read(a_database.url, QUERY)] == [(3,)]
        connection.commit()
    assert [tuple(row) for row in read(a_database.url, QUERY)] == [(7,)]
    engine.dispose()


def test_the_figures_say_on_what_they_were_made(a_database: Database) -> None:
    with a_database.engine().connect():  # a file comes into being
        names = {"sqlite": "SQLite 3", "mysql": "", "postgresql": "PostgreSQL 1"}
        assert version_of(a_database.url).startswith(names[a_database.kind])


def test_a_demo_without_a_server_says_what_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLES["postgresql"], raising=False)
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", os.urandom(6).hex())
    run = TestRun()
    with run.alone():  # what the ladder leaves when none of its rungs holds
        run.note("service-postgresql", {"missing": "no postgresql for the tests. planted"})
    assert demo.main(["--database", "postgresql", "--days", "3"]) == 1
    run.close()
    said = capsys.readouterr().err
    assert "The demo cannot start: there is no postgresql server. Install postgresql, or" in said
    assert f"by {VARIABLES['postgresql']}.\nno postgresql for the tests. planted" in said


def test_a_demo_whose_server_does_not_start_shows_what_the_server_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "mysqld"
    program.write_text(
        '#!/bin/sh\ncase "$*" in --version | *--initialize*) exit 0 ;; esac\n'
        "echo no folder for my files >&2\nexit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.delenv(VARIABLES["mysql"], raising=False)
    monkeypatch.setenv(CHOSEN_SERVER, str(program))
    monkeypatch.setenv(CHOSEN_RUNGS, "private")
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", os.urandom(6).hex())
    assert demo.main(["--database", "mariadb", "--days", "3"]) == 1
    said = capsys.readouterr().err
    assert "The demo cannot start: mysql does not start" in said
    assert "no folder for my files" in said


def test_the_databases_of_a_server_are_dropped_after_the_run(
    mysql_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLES["mysql"], mysql_database.url)
    with open_databases("mariadb", tmp_path) as urls:
        names = [str(sa.make_url(url).database) for url in urls.values()]
        assert set(names) < shown(mysql_database)
    assert set(names).isdisjoint(shown(mysql_database))


def shown(database: Database) -> set[str]:
    return {row[0] for row in read(database.url, "SHOW DATABASES")}
