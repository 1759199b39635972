from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from tests.client.consumer.kit import Bench
from tests.client.consumer.shop import make_engine
from tests.services.databases import Database


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def engine(a_database: Database) -> Iterator[sa.Engine]:
    """A shop in a database of each kind in turn."""
    made = make_engine(a_database.url)
    yield made
    made.dispose()
