"""The pages about wire formats say what the code does: fields, limits, defaults, examples."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import pytest

from qmq_client.wire import frame, frame_head, packing, record
from qmq_client.wire.frame import FrameKind
from qmq_client.wire.limits import DEFAULT_LIMITS
from qmq_client.wire.requests import PullRequest
from tests.format.pages import box, check_example, fields, marks, packed, read_page, rows
from tests.golden.version_1 import FRAME_RUNS, golden

FIELDS: dict[tuple[str, str], list[tuple[int, int]]] = {
    ("record.md", "record"): packed(f">I{packing.HEAD.format[1:]}", record._DUE.format),
    ("record.md", "header pair"): packed(packing.PAIR.format),
    ("frame.md", "frame"): packed(frame_head._HEADER.format),
    ("frame.md", "subject"): packed(frame._SUBJECT.format),
}
EXAMPLES = {
    "record.md": "record_full",
    "frame.md": "frame_stamped",
    "requests.md": "control_pull_request",
}


@pytest.mark.parametrize(("page", "name"), FIELDS)
def test_a_table_of_fields_is_the_struct_of_the_code(page: str, name: str) -> None:
    assert fields(page, name) == FIELDS[page, name]


@pytest.mark.parametrize("page", ["record.md", "frame.md"])
def test_every_table_of_fields_is_compared(page: str) -> None:
    assert {(page, name) for name in marks(page, "fields")} == {
        each for each in FIELDS if each[0] == page
    }


def test_the_boxes_in_the_modules_are_those_of_the_pages() -> None:
    assert box(record.__doc__) == fields("record.md", "record")
    assert box(frame.__doc__) == fields("frame.md", "frame")


@pytest.mark.parametrize("page", EXAMPLES)
def test_a_worked_example_shows_the_golden_bytes(page: str) -> None:
    assert set(marks(page, "example")) == {EXAMPLES[page]}
    check_example(page, EXAMPLES[page], golden(EXAMPLES[page]))


def test_the_limits_of_the_page_are_the_default_limits() -> None:
    table = rows(marks("record.md", "limits")[""])
    assert {row[0].strip("`"): int(row[1]) for row in table} == dataclasses.asdict(DEFAULT_LIMITS)


def test_the_page_lists_every_kind_of_frame() -> None:
    table = [line.split("|") for line in read_page("frame.md").splitlines() if line.count("|") == 4]
    kinds = {row[2].strip().strip("`"): row[1].strip() for row in table}
    assert {kind.name: str(kind.value) for kind in FrameKind}.items() <= kinds.items()


def test_the_defaults_of_a_pull_on_the_page_are_those_of_the_code() -> None:
    said = {
        row[0].strip("`"): row[1] for row in rows(marks("requests.md", "defaults")["PullRequest"])
    }
    actual = {
        field.name: "refused"
        if field.default is msgspec.NODEFAULT
        else "not set"
        if field.default is msgspec.UNSET
        else json.dumps(field.default)
        if field.default != ()
        else "none"
        for field in msgspec.structs.fields(PullRequest)
    }
    assert said == actual


def test_what_the_frame_page_counts_is_so() -> None:
    page = read_page("frame.md")
    records = [golden(name) for names in FRAME_RUNS.values() for name in names]
    assert f"{len(golden('frame_stamped'))} bytes, of which {sum(map(len, records))}" in page
    assert "bytes 20 … 71 are zero" in page
    assert golden("frame_messages")[20:72] == bytes(52)
