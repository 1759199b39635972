"""The business database of the outbox benchmarks: two small tables and the outbox.

On SQLite WAL with synchronous=FULL, so that each commit is on the disk when it returns; otherwise
SQLAlchemy's defaults.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from qmq_client import create_tables

#: MySQL wants to know how long a text may be.
_TEXT: Final = {str: sa.String(64)}


class Base(DeclarativeBase):
    """The tables of the business."""

    type_annotation_map: ClassVar = _TEXT


class Order(Base):
    """What each transaction inserts."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    amount: Mapped[int]
    note: Mapped[str]


class Posting(Base):
    """What a transaction with two INSERTs inserts as well."""

    __tablename__ = "postings"

    id: Mapped[int] = mapped_column(primary_key=True)
    account: Mapped[str]
    amount: Mapped[int]
    note: Mapped[str]


def open_database(url: str) -> sa.Engine:
    """A new database with business tables and outbox."""
    engine = sa.create_engine(url)
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine, "connect", set_durability)
    Base.metadata.create_all(engine)
    create_tables(engine)
    return engine


def set_durability(connection: Any, _record: Any) -> None:
    """Called with each new connection of the driver."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def make_order(i: int) -> Order:
    """The order of one transaction."""
    return Order(customer=f"customer-{i % 97}", amount=i, note="two suitcases, window seat")


def make_posting(i: int) -> Posting:
    """The second row of a transaction with two INSERTs, of the size of the first."""
    return Posting(account=f"account-{i % 89}", amount=-i, note="paid by card, not refundable")
