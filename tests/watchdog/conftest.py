"""A database with an outbox, and a broker in memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from qmq_client.transport.memory import MemoryBroker
from qmq_watchdog.databases import Database
from tests.watchdog.rows import make_database


@pytest.fixture(autouse=True)
def _left_out_of_collections_again() -> Iterator[None]:
    """A watchdog that ends gives back to the collector what `tests/conftest.py` kept from it."""
    yield
    if not gc.get_freeze_count():
        gc.freeze()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = make_database(tmp_path / "shop.db")
    yield made
    made.close()


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()
