"""Finds in which parts of the log messages are, by their ids.

An id is a producer's instance and a dense counter, and Parquet keeps the least and greatest of both for each row group.
So a look-up reads only row groups that may have the ids; for yesterday's ids these are few. Ids made of dedupe keys may
be anywhere, so for them two columns of the whole table are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from qmq_pipeline.tables.schemas import LOG
from qmq_pipeline.tables.store import Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Producers that a query names one by one; with more it reads everything.
_PRODUCERS_MAX: Final = 64
#: Ids made of a dedupe key begin with these two bytes; as signed numbers they are between these.
_DEDUPE_FIRST: Final = (0xDED0 << 48) - 2**64
_DEDUPE_LAST: Final = _DEDUPE_FIRST + 2**48 - 1
_IS_DEDUPE: Final = f"producer BETWEEN {_DEDUPE_FIRST} AND {_DEDUPE_LAST}"


def parts_with(tables: Tables, ids: DataFrame, *, below: int) -> set[int]:
    """The parts of the log that have messages with these ids, up to the part `below`."""
    ids = ids.distinct().persist()
    try:
        condition = _may_be(ids)
        if condition is None:
            return set()
        log = tables.read(LOG).where(f"kind = 'message' AND part <= {below} AND ({condition})")
        found = log.join(ids, ["producer", "counter"], "left_semi").select("part").distinct()
        return {int(row["part"]) for row in found.collect()}
    finally:
        ids.unpersist()


def _may_be(ids: DataFrame) -> str | None:
    """A condition that every message with one of the ids fulfils; None if there is no id."""
    from pyspark.sql import functions as fn

    spans = (
        ids.groupBy(fn.expr(f"IF({_IS_DEDUPE}, NULL, producer)").alias("producer"))
        .agg(fn.min("counter").alias("first"), fn.max("counter").alias("last"))
        .limit(_PRODUCERS_MAX + 1)
        .collect()
    )
    if len(spans) > _PRODUCERS_MAX:
        return "TRUE"
    return (
        " OR ".join(
            f"({_IS_DEDUPE})"
            if row["producer"] is None
            else f"(producer = {row['producer']} AND counter BETWEEN {row['first']} AND {row['last']})"
            for row in spans
        )
        or None
    )
