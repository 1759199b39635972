"""The business tables of the demo's services."""

from __future__ import annotations

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class BoardBase(DeclarativeBase):
    """Tables of the departures service."""


class BoardEntry(BoardBase):
    """One line of the departures board; its highest index says where to resume."""

    __tablename__ = "board"

    flight_index: Mapped[int] = mapped_column(primary_key=True)
    #: Which try at this flight stands here, for the demo's judge.
    transaction_id: Mapped[str]
    flight: Mapped[str]
    day: Mapped[str]
    origin: Mapped[str]
    destination: Mapped[str]
    #: "departed" or "cancelled".
    state: Mapped[str]
    departure_delay: Mapped[int | None]
    #: Set in the arrival's savepoint.
    arrival_delay: Mapped[int | None]
    #: Whether the arrival was booked.
    has_arrived: Mapped[bool] = mapped_column(default=False)


class TallyBase(DeclarativeBase):
    """Tables of the tallies service."""


class Tally(TallyBase):
    """How many events of a kind an airport saw of a carrier on a day."""

    __tablename__ = "tallies"

    event: Mapped[str] = mapped_column(primary_key=True)
    airport: Mapped[str] = mapped_column(primary_key=True)
    carrier: Mapped[str] = mapped_column(primary_key=True)
    day: Mapped[str] = mapped_column(primary_key=True)
    count: Mapped[int]


class Effect(TallyBase):
    """One row per effect, without a unique message id: a doubled effect would show."""

    __tablename__ = "effects"

    id: Mapped[int] = mapped_column(primary_key=True)
    message_id: Mapped[str]


def open_database(url: str, base: type[DeclarativeBase], *, synchronous: str) -> Engine:
    """Engine of a service's SQLite database with its tables, in WAL mode."""
    engine = create_engine(url, connect_args={"timeout": 30})

    @event.listens_for(engine, "connect")
    def _configure(connection: object, _: object) -> None:
        cursor = connection.cursor()  # type: ignore[attr-defined]  # a DBAPI connection
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute(f"PRAGMA synchronous={synchronous}")
        cursor.close()

    base.metadata.create_all(engine)
    return engine
