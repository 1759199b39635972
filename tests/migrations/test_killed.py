"""Runs that are killed, and runs that meet."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from qmq_client.doctor.drift import find_drift
from qmq_client.outbox.table import DEFAULT_TABLES
from qmq_migrations.lock import lock_for
from qmq_migrations.upgrade import migrate, newest_revision
from tests.conftest import MakeDatabase, MakeServer
from tests.migrations.processes import DEADLINE_S, changes_of, start
from tests.migrations.schemas import live_schema
from tests.services.databases import KINDS, Databases

STARTS = 4


@pytest.mark.parametrize("kind", KINDS)
def test_F39_a_run_killed_after_any_statement_is_completed_by_the_next(
    make_database: MakeDatabase, kind: str
) -> None:
    whole = make_database(kind).engine()
    changes = changes_of(whole)
    migrate(whole)
    assert len(changes) >= 9, changes
    killed = [make_database(kind) for _ in range(len(changes) + 1)]
    process = start("die", *[database.url for database in killed])
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    tables_left = []
    for database in killed:
        engine = database.engine()
        tables_left.append(len(live_schema(engine)))
        assert migrate(engine).after == newest_revision()
        assert live_schema(engine) == live_schema(whole)
        with engine.connect() as connection:
            assert find_drift(connection, DEFAULT_TABLES) == []
    if kind == "mysql":  # it keeps what was done so far; the others keep nothing
        assert set(tables_left) == {0, 1, 2, 3}
    else:
        assert set(tables_left) == {0}


@pytest.mark.parametrize("kind", KINDS)
def test_of_four_starts_at_once_one_migrates_and_all_succeed(
    make_database: MakeDatabase, kind: str
) -> None:
    database = make_database(kind)
    engine = database.engine()
    with engine.connect() as gate, lock_for(gate, 5.0):
        processes = [start("migrate", database.url) for _ in range(STARTS)]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
    answers = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * STARTS
    newest = newest_revision()
    outcomes = sorted((json.loads(answer) for answer in answers), key=str, reverse=True)
    assert outcomes == [[None, newest]] + [[newest, newest]] * (STARTS - 1)
    with engine.connect() as connection:
        versions = connection.exec_driver_sql("SELECT version_num FROM qmq_version").scalars()
        assert list(versions) == [newest]


@pytest.mark.parametrize("kind", ["mysql", "postgresql"])
def test_F39_a_run_whose_server_was_killed_is_completed_when_it_is_back(
    databases: Databases, make_private_server: MakeServer, kind: str
) -> None:
    server = make_private_server(kind)
    whole = databases.make_on(server.url(), kind, "whole").engine()
    migrate(whole)
    for count in (1, 4, 6, 9):
        half = databases.make_on(server.url(), kind, f"half_{count}").engine()
        changes = changes_of(half)

        def kill(*_: Any, changes: list[str] = changes, count: int = count) -> None:
            if len(changes) == count:
                server.kill()

        event.listen(half, "after_cursor_execute", kill)
        with pytest.raises(sa.exc.OperationalError):
            migrate(half)
        event.remove(half, "after_cursor_execute", kill)
        server.start()
        whole.dispose()
        half.dispose()
        assert migrate(half).after == newest_revision()
        assert live_schema(half) == live_schema(whole)
        half.dispose()
    whole.dispose()
