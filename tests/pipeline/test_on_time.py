"""The example script over the flights of three days, and that it sees one message that is missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from examples.flights.data import read_flights
from examples.flights.plan import CANCELLED, DEPARTED
from examples.pipeline.on_time import main
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import Record
from tests.pipeline.world import START_MS, DataDirectory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def flight_messages() -> Iterator[Record]:
    ids = MessageIds(3)
    for flight in read_flights(frozenset({2}), 3):
        if flight.tail_number is not None:
            yield Record(
                message_id=ids.next_id(),
                subject=CANCELLED if flight.departure_delay is None else DEPARTED,
                body=msgspec.json.encode(asdict(flight)),
                born_at_ms=START_MS,
            )


def test_the_table_of_the_messages_is_that_of_the_file_and_a_missing_message_shows(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = list(flight_messages())
    for name, some in (("whole", every), ("short", every[1:])):
        directory = DataDirectory(tmp_path / name)
        directory.append(some)
        directory.close()
    days = ("--month", "2", "--days", "3")
    assert main([str(tmp_path / "whole"), *days]) == 0, capsys.readouterr().out
    capsys.readouterr()
    assert main([str(tmp_path / "short"), *days]) == 1
    said = capsys.readouterr().out
    assert "NOT equal to the file" in said
    assert said.count("in the messages") == 1
