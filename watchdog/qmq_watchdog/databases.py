"""The databases that one watchdog looks after.

Each has a store with a small pool of its own, so one that is slow or away holds nothing that another
needs. Opening connects to nothing: a database that is away now may be there for the next sweep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from qmq_client.config import DatabaseSection
from qmq_client.database import open_engine, section_tables
from qmq_client.outbox.store import OutboxStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """One business database with an outbox."""

    #: How logs and commands call it; shows no secret.
    name: str
    store: OutboxStore
    engine: sa.Engine

    def close(self) -> None:
        """Give up its connections."""
        self.store.close()
        self.engine.dispose()


def open_databases(
    sections: Sequence[DatabaseSection], environment: Mapping[str, str]
) -> list[Database]:
    """The configured databases; raises `ConfigurationError` for the first that cannot be meant."""
    return [_open(section, environment) for section in sections]


def _open(section: DatabaseSection, environment: Mapping[str, str]) -> Database:
    engine = open_engine(section, environment)
    store = OutboxStore(engine, section_tables(section))
    return Database(name=section.name, store=store, engine=engine)
