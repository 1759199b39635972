"""Pushes down conditions of a query on subject, time of storing and offset.

A condition is only a hint and always returned to Spark, which checks every row again: reading too
many rows costs time but never gives a wrong answer. Unknown conditions are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from qmq_pipeline.places.options import LogOptions

#: The operator of a filter on one column, by the name of its class in `pyspark.sql.datasource`.
_LOWER: Final = frozenset({"GreaterThan", "GreaterThanOrEqual", "EqualTo", "EqualNullSafe"})
_UPPER: Final = frozenset({"LessThan", "LessThanOrEqual", "EqualTo", "EqualNullSafe"})
#: The latest time of rows.
_BEGINNING: Final = datetime(1970, 1, 1, tzinfo=UTC)


def narrow(options: LogOptions, filters: Iterable[Any]) -> tuple[LogOptions, list[Any]]:
    """Options that leave out what the filters exclude, and the filters that Spark must check."""
    given = list(filters)
    for one in given:
        attribute: tuple[str, ...] = getattr(one, "attribute", ())
        apply = _BY_COLUMN.get(attribute[0]) if len(attribute) == 1 else None
        if apply is not None:
            options = apply(options, type(one).__name__, getattr(one, "value", None))
    return options, given


def _by_subject(options: LogOptions, relation: str, value: Any) -> LogOptions:
    if relation in {"EqualTo", "EqualNullSafe"} and isinstance(value, str):
        wanted = frozenset({value})
    elif relation == "In" and all(isinstance(one, str) for one in value):
        wanted = frozenset(value)
    else:
        return options
    known = options.subjects
    return replace(options, subjects=wanted if known is None else wanted & known)


def _by_time(options: LogOptions, relation: str, value: Any) -> LogOptions:
    if not isinstance(value, datetime) or value.tzinfo is None:
        return options
    # In whole numbers: a float of seconds may fall a millisecond short, as from 2038 on.
    time_ms = (value - _BEGINNING) // timedelta(milliseconds=1)
    if relation in _LOWER:
        options = replace(options, first_stored_at_ms=max(options.first_stored_at_ms, time_ms))
    if relation in _UPPER:
        options = replace(options, next_stored_at_ms=min(options.next_stored_at_ms, time_ms + 1))
    return options


def _by_offset(options: LogOptions, relation: str, value: Any) -> LogOptions:
    if not isinstance(value, int):
        return options
    if relation in _LOWER:
        options = replace(options, skip_below_offset=max(options.skip_below_offset, value))
    if relation in _UPPER:
        known = options.next_offset
        after = value + 1 if known is None else min(known, value + 1)
        options = replace(options, next_offset=after)
    return options


_BY_COLUMN: Final[dict[str, Callable[[LogOptions, str, Any], LogOptions]]] = {
    "subject": _by_subject,
    "stored_at": _by_time,
    "physical_offset": _by_offset,
}
