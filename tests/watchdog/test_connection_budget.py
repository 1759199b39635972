"""Who counts against the budget of connections: databases at rest, and none that is being swept."""

from __future__ import annotations

from pathlib import Path

from qmq_watchdog.databases import ConnectionBudget
from tests.watchdog.rows import make_database
from tests.watchdog.test_bounds import open_connections, used


def test_a_database_that_is_swept_takes_no_room_from_those_at_rest(tmp_path: Path) -> None:
    databases = [make_database(tmp_path / f"{number}.db") for number in range(3)]
    budget = ConnectionBudget(2)
    used(budget, databases[0], was_busy=False)
    with databases[0].lock:
        budget.take(databases[0])
        for each in databases[1:]:
            used(budget, each, was_busy=False)
    assert budget.kept == 2
    assert [open_connections(each) for each in databases] == [1, 1, 1]
    for each in databases:
        each.close()
