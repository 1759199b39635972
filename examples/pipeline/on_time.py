"""Who is on time? A table made of the messages alone, and compared with the file they came from.

First the demo, which leaves the files of its broker in a folder; then this script, from top to bottom or
cell by cell in an editor that knows `# %%`:

    python3 dev.py demo --all --keep /tmp/year
    .venv/bin/python -m examples.pipeline.on_time /tmp/year/broker

`--month` and `--days` are those that the demo was given. Exit code 1 when a count differs from the file.
"""

# %%
from __future__ import annotations

import argparse
import csv
import io
import sys
import zipfile
from collections import Counter
from typing import TYPE_CHECKING

from examples.flights.data import ON_TIME_MINUTES_MAX, data_file
from examples.flights.plan import CANCELLED, DEPARTED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Of a flight's body, what the table needs; the rest is not looked at.
BODY = "carrier STRING, departure_delay INT"
#: Carrier → flights that departed, of those on time, and flights that were cancelled.
Table = dict[str, tuple[int, int, int]]


# %% The messages, straight from the broker's files: no table is made first.
def read_messages(spark: SparkSession, path: str) -> DataFrame:
    """Subject and body of every departure and cancellation; of the others nothing is decoded."""
    return (
        spark.read.format("qmq")
        .option("path", path)
        .option("subject", f"{DEPARTED},{CANCELLED}")
        .option("columns", "subject,body")
        .load()
    )


# %% Bodies are JSON, so each is a row like any other.
def on_time(messages: DataFrame) -> DataFrame:
    """One row for each carrier, the most punctual first."""
    flight = f"from_json(CAST(body AS STRING), '{BODY}') AS flight"
    flights = messages.selectExpr("subject", flight).selectExpr("subject", "flight.*")
    has_departed = f"subject = '{DEPARTED}'"
    is_on_time = f"{has_departed} AND departure_delay <= {ON_TIME_MINUTES_MAX}"
    return (
        flights.selectExpr(
            "carrier",
            f"INT({has_departed}) AS departed",
            f"INT({is_on_time}) AS on_time",
            f"INT(subject = '{CANCELLED}') AS cancelled",
        )
        .groupBy("carrier")
        .sum("departed", "on_time", "cancelled")
        .toDF("carrier", "departed", "on_time", "cancelled")
        .selectExpr("*", "ROUND(100 * try_divide(on_time, departed), 1) AS percent")
        .orderBy("percent", "carrier", ascending=[False, True])
    )


# %% The same from the file, by the standard library, with the demo's one rule: no tail number, no flight.
def count_in_file(months: frozenset[int], days: int) -> Table:
    """Counts by hand."""
    departed: Counter[str] = Counter()
    punctual: Counter[str] = Counter()
    cancelled: Counter[str] = Counter()
    with zipfile.ZipFile(data_file()) as archive, archive.open("flights.csv") as raw:
        for row in csv.DictReader(io.TextIOWrapper(raw, "utf-8")):
            if int(row["month"]) not in months or int(row["day"]) > days:
                continue
            if row["tailnum"] in ("", "NA"):
                continue
            if row["dep_time"] in ("", "NA"):
                cancelled[row["carrier"]] += 1
                continue
            departed[row["carrier"]] += 1
            punctual[row["carrier"]] += float(row["dep_delay"]) <= ON_TIME_MINUTES_MAX
    carriers = departed.keys() | cancelled.keys()
    return {one: (departed[one], punctual[one], cancelled[one]) for one in carriers}


# %% Both side by side.
def main(arguments: list[str]) -> int:
    """Print the table; 1 when it is not what the file says."""
    parser = argparse.ArgumentParser(prog="on_time", description=__doc__)
    parser.add_argument("path", help="data directory of the demo's broker")
    parser.add_argument("--month", type=int, choices=range(1, 13), help="only this one")
    parser.add_argument("--days", type=int, default=31, help="only the first days of a month")
    options = parser.parse_args(arguments)
    from qmq_pipeline.spark.session import get_session

    rows = on_time(read_messages(get_session(), options.path)).collect()
    print("carrier  departed  on time  cancelled  on time")
    for row in rows:
        counts = f"{row['departed']:>8,} {row['on_time']:>8,} {row['cancelled']:>10,}"
        print(f"{row['carrier']:<8} {counts} {row['percent'] or 0:>6} %")
    told = {row["carrier"]: (row["departed"], row["on_time"], row["cancelled"]) for row in rows}
    months = frozenset({options.month} if options.month else range(1, 13))
    by_hand = count_in_file(months, options.days)
    different = {one for one in told.keys() | by_hand.keys() if told.get(one) != by_hand.get(one)}
    for one in sorted(different):
        print(f"{one}: {told.get(one)} in the messages, {by_hand.get(one)} in the file")
    print("equal to the file" if not different else "NOT equal to the file")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
