"""The times that an audit judges: those that are known on both sides, with the grace at each of their ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qmq_pipeline.jobs.audit_window import Window, judged_window
from qmq_pipeline.places.config import AuditOptions, PipelineConfig
from qmq_pipeline.tables.commits import EXPIRED, SCANNED_AT, RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import MESSAGES, OUTBOX

S = 1_000
GRACE_S = 10.0


def part(
    first: int, first_at_s: int, last_at_s: int, notes: Mapping[str, Any] | None = None
) -> RangeFacts:
    return RangeFacts(
        source="store",
        first=first,
        next=first + 100,
        rows=0,
        files=(),
        first_at_ms=first_at_s * S,
        last_at_ms=last_at_s * S,
        notes=notes or {},
    )


def expired(first: int) -> RangeFacts:
    return part(first, 0, 0, {EXPIRED: True})


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """The log was read at 9,000 s, one outbox at 8,000 s and another one later."""
    made = Lake(str(tmp_path / "tables"))
    made.prepare()
    made.write_state(MESSAGES, {"read_at_ms": 9_000 * S})
    for name, scanned_s in (("orders", 8_000), ("mail", 8_500)):
        scan = replace(part(0, 0, 0, {SCANNED_AT: scanned_s * S}), source=name)
        made.commit(OUTBOX, [scan], name=f"{name}-1")
    return made


def judged(lake: Lake, *ranges: RangeFacts, **options: Any) -> Window:
    lake.commit(MESSAGES, ranges)
    audit = AuditOptions(grace_s=GRACE_S, **options)
    return judged_window(lake, PipelineConfig(tables=lake.root, audit=audit))


def test_P4_it_ends_with_the_side_that_was_read_first_and_begins_where_the_log_is_known(
    lake: Lake,
) -> None:
    whole = judged(lake, part(0, 1_000, 2_000))
    assert (whole.first_ms, whole.next_ms, whole.gaps) == (0, 7_990 * S, ())
    lake.write_state(MESSAGES, {"read_at_ms": 7_000 * S})
    assert judged(lake, part(0, 1_000, 2_000)).next_ms == 6_990 * S
    late = judged(Lake(lake.root), part(100, 3_000, 4_000), part(200, 4_000, 5_000))
    assert late.first_ms == 0, "the beginning of the log is in the tables all the same"


def test_P4_where_the_log_was_not_read_from_its_beginning_the_first_grace_is_not_judged(
    lake: Lake,
) -> None:
    window = judged(lake, part(100, 1_000, 2_000))
    assert (window.first_ms, window.next_ms) == (1_010 * S, 7_990 * S)
    assert any("first read from offset 100" in reason for reason in window.coverage)


def test_P4_what_expired_unread_is_not_judged_nor_what_was_on_its_way_on_either_side(
    lake: Lake,
) -> None:
    window = judged(lake, part(0, 1_000, 2_000), expired(100), part(200, 5_000, 6_000))
    assert window.gaps == ((1_990 * S, 5_010 * S),)
    edges = (1_990 * S - 1, 1_990 * S, 5_010 * S - 1, 5_010 * S)
    assert [window.is_judged(at_ms) for at_ms in edges] == [True, False, False, True]
    assert any("offsets 100 to 200" in reason for reason in window.coverage)


def test_P4_behind_what_expired_last_nothing_is_judged(lake: Lake) -> None:
    window = judged(lake, part(0, 1_000, 2_000), expired(100))
    assert window.gaps == ((1_990 * S, 7_990 * S),)


def test_a_window_that_was_asked_for_makes_it_shorter_and_never_longer(lake: Lake) -> None:
    short = judged(lake, part(0, 1_000, 2_000), since_ms=1_500 * S, until_ms=1_700 * S)
    assert (short.first_ms, short.next_ms) == (1_500 * S, 1_700 * S)
    long = judged(lake, part(0, 1_000, 2_000), since_ms=0, until_ms=9_999 * S)
    assert (long.first_ms, long.next_ms) == (0, 7_990 * S)
