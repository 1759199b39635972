"""Conditions of a query spare reading, and never a row that the query wants."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from qmq_pipeline.places.options import LogOptions, parse_log_options
from qmq_pipeline.rows.filters import narrow

AT = datetime(2026, 1, 31, 12, 0, 0, 123_999, UTC)
AT_MS = 1_769_860_800_123
ALL = parse_log_options({"path": "/nowhere"})


@pytest.mark.parametrize(
    ("known", "condition", "narrowed"),
    [
        ({}, EqualTo(("subject",), "a"), {"subjects": frozenset("a")}),
        ({"subjects": frozenset("ab")}, In(("subject",), ("b", "c")), {"subjects": frozenset("b")}),
        ({"subjects": frozenset("b")}, EqualTo(("subject",), "a"), {"subjects": frozenset()}),
        ({}, LessThan(("stored_at",), AT), {"next_stored_at_ms": AT_MS + 1}),
        ({}, GreaterThanOrEqual(("stored_at",), AT), {"first_stored_at_ms": AT_MS}),
        (
            {},
            EqualTo(("stored_at",), AT),
            {"first_stored_at_ms": AT_MS, "next_stored_at_ms": AT_MS + 1},
        ),
        ({"first_stored_at_ms": AT_MS + 9}, GreaterThanOrEqual(("stored_at",), AT), {}),
        (
            {},
            EqualTo(("physical_offset",), 4096),
            {"skip_below_offset": 4096, "next_offset": 4097},
        ),
        ({"next_offset": 8192}, LessThanOrEqual(("physical_offset",), 4096), {"next_offset": 4097}),
        ({"next_offset": 4000}, LessThanOrEqual(("physical_offset",), 4096), {}),
        ({}, GreaterThanOrEqual(("physical_offset",), 4096), {"skip_below_offset": 4096}),
        ({"skip_below_offset": 8192}, GreaterThan(("physical_offset",), 4096), {}),
        ({}, EqualTo(("headers", "key"), "a"), {}),
        ({}, EqualTo(("subject",), None), {}),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
def test_P1_a_condition_leaves_out_nothing_that_it_could_mean(
    known: dict[str, Any], condition: Any, narrowed: dict[str, Any]
) -> None:
    options: LogOptions = replace(ALL, **known)
    found, left = narrow(options, [condition])
    assert found == replace(options, **narrowed)
    assert left == [condition]


def test_P1_no_millisecond_falls_out_of_a_condition_that_names_it() -> None:
    """As a float of seconds many would, in 2039 as in 2004."""
    first = datetime(2039, 2, 1, tzinfo=UTC)
    first_ms = 2_180_131_200_000
    for number in range(1_000):
        condition = EqualTo(("stored_at",), first + timedelta(milliseconds=number))
        found, _ = narrow(ALL, [condition])
        at_ms = first_ms + number
        assert (found.first_stored_at_ms, found.next_stored_at_ms) == (at_ms, at_ms + 1)
