from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.world import World, a_world
from tests.services.databases import Database


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """On SQLite: for what does not depend on the database."""
    with a_world(tmp_path) as made:
        yield made


@pytest.fixture
def any_world(a_database: Database, tmp_path: Path) -> Iterator[World]:
    """On each kind of database in turn."""
    with a_world(tmp_path, database=a_database) as made:
        yield made


@pytest.fixture
def server_world(a_server_database: Database, tmp_path: Path) -> Iterator[World]:
    """On each kind that has a server, in turn."""
    with a_world(tmp_path, database=a_server_database) as made:
        yield made
