"""What must come out, counted straight from the CSV file.

Shares nothing with the product and nothing with the services of this example but the file: the
standard library reads the rows and applies the rules of the demo again, in its own words.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

Tally = Counter[tuple[str, str, str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Counts by hand."""

    #: (event, airport, carrier, day) → how many.
    tallies: Tally
    #: event → how many.
    messages: Counter[str]
    #: Flights whose transaction stands.
    committed: int
    #: Flights without a tail number, whose whole transaction is rolled back.
    rolled_back: int
    #: Departures whose arrival savepoint is rolled back.
    savepoints_rolled_back: int


def count_by_hand(file: Path, months: frozenset[int], days: int) -> Expected:
    """Count the events that the first `days` days of these months must cause."""
    tallies: Tally = Counter()
    committed = rolled_back = savepoints = 0
    with zipfile.ZipFile(file) as archive, archive.open("flights.csv") as raw:
        lines = csv.reader(io.TextIOWrapper(raw, "utf-8"))
        names = next(lines)
        month, day_of_month = names.index("month"), names.index("day")
        for values in lines:
            if int(values[month]) not in months or int(values[day_of_month]) > days:
                continue
            row = dict(zip(names, values, strict=True))
            if row["tailnum"] in ("", "NA"):
                rolled_back += 1
                continue
            committed += 1
            events = _events(row)
            savepoints += row["dep_time"] not in ("", "NA") and "arrived" not in events
            day = f"{int(row['year'])}-{int(row['month']):02}-{int(row['day']):02}"
            for event in events:
                tallies[event, row["origin"], row["carrier"], day] += 1
    messages: Counter[str] = Counter()
    for (event, _, _, _), count in tallies.items():
        messages[event] += count
    return Expected(
        tallies=tallies,
        messages=messages,
        committed=committed,
        rolled_back=rolled_back,
        savepoints_rolled_back=savepoints,
    )


def _events(row: dict[str, str]) -> list[str]:
    if row["dep_time"] in ("", "NA"):
        return ["cancelled"]
    events = ["departed"]
    late = float(row["dep_delay"])
    if late > 180:
        events.append("delayed severe")
    elif late > 60:
        events.append("delayed major")
    elif late > 15:
        events.append("delayed minor")
    if late > 15:
        events.append("boarding_closes")
    if row["air_time"] not in ("", "NA"):
        events.append("arrived")
    return events
