"""The business tables of the demo's services."""

from __future__ import annotations

from typing import ClassVar

from sqlalchemy import String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

#: Longer than any text here; MySQL wants to know.
TEXT = {str: String(64)}


class BoardBase(DeclarativeBase):
    """Tables of the departures service."""

    type_annotation_map: ClassVar = TEXT


class BoardEntry(BoardBase):
    """One line of the departures board; its highest index says where to resume."""

    __tablename__ = "board"

    #: MySQL would count by itself where it is given 0.
    flight_index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
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

    type_annotation_map: ClassVar = TEXT


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
