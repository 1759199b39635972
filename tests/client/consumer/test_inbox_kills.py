"""A consumer process that dies at any moment of its transaction, on each kind of database."""

from __future__ import annotations

import signal

import pytest

from tests.client.consumer.shop import count_of, make_engine
from tests.kit import warm
from tests.services.databases import Database

KILLED_AT = ["begun", "changed", "committed"]
PROCESS_S_MAX = 90


def consume(database: Database, moment: str, batch_size: int, *, is_async: bool) -> int:
    """One consumer process from its start to its end; its exit code."""
    more = [database.async_url] if is_async else []
    line = ["tests.client.consumer.shop", database.url, moment, str(batch_size), *more]
    return warm.run(line, timeout=PROCESS_S_MAX).returncode


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("moment", KILLED_AT)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_F30_F32_C5_a_process_killed_at_any_moment_has_each_effect_once(
    a_database: Database, moment: str, batch_size: int, is_async: bool
) -> None:
    engine = make_engine(a_database.url)
    assert consume(a_database, moment, batch_size, is_async=is_async) == -signal.SIGKILL
    assert count_of(engine) == (batch_size if moment == "committed" else 0)
    assert consume(a_database, "never", batch_size, is_async=is_async) == 0
    assert count_of(engine) == 3
    engine.dispose()
