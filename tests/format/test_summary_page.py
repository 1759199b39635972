"""The page about summaries says what the storage does."""

from __future__ import annotations

from typing import Any

import pytest

from qmq_broker.storage.logs import summary
from tests.format.pages import check_array, check_example, read_page
from tests.golden.version_1 import golden

PAGE = "summary.md"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("SegmentSummary", summary.SegmentSummary),
        ("TimeMark", summary.TimeMark),
        ("SubjectSpan", summary.SubjectSpan),
    ],
)
def test_an_array_on_the_page_is_the_struct_of_the_code(name: str, kind: Any) -> None:
    check_array(PAGE, name, kind)


def test_the_worked_example_shows_the_golden_bytes() -> None:
    check_example(PAGE, "summary_sealed", golden("summary_sealed"))


def test_the_numbers_on_the_page_are_those_of_the_code() -> None:
    page = read_page(PAGE)
    assert f"{summary.MARK_BYTES:,} bytes" in page
    assert f"{summary.SUBJECTS_MAX:,} subjects" in page
