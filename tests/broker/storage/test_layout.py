from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq_broker.storage.files import layout

NAMES = st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9_.\-]{0,30}\Z")


@given(NAMES)
def test_a_subject_comes_back_from_its_folder_name(subject: str) -> None:
    assert layout.parse_subject(layout.encode_subject(subject)) == subject


@given(NAMES, NAMES)
def test_two_subjects_have_two_folders_also_where_case_is_folded(one: str, other: str) -> None:
    folders = {layout.encode_subject(name).lower() for name in (one, other)}
    assert len(folders) == len({one, other})


def test_all_short_subjects_have_folders_of_their_own() -> None:
    subjects = ["".join(letters) for letters in itertools.product("aA~_0"[:2] + "_0", repeat=4)]
    assert len({layout.encode_subject(name).lower() for name in subjects}) == len(subjects)


def test_a_longest_subject_is_a_possible_file_name() -> None:
    assert len(layout.encode_subject("A" * 127)) <= 255


@pytest.mark.parametrize(
    "name", ["", "A", "a~", "~A", "~~a", "~1", "..", ".a", "lost+found", "a/b", "a\n"]
)
def test_a_strange_folder_is_no_subject(name: str) -> None:
    assert layout.parse_subject(name) is None


def test_segments_are_named_by_their_offset() -> None:
    assert layout.segment_path(layout.COMMIT_LOG, 1_073_741_824) == "commitlog/00000000001073741824"
    assert layout.parse_number("00000000001073741824") == 1_073_741_824
    assert layout.queue_path("Orders", 6_000_000) == "consumequeue/~orders/00000000000006000000"


@pytest.mark.parametrize(
    "name",
    ["0", "0000000000107374182", "000000000010737418240", "0000000000107374182x", "0" * 20 + "\n"],
)
def test_a_strange_file_is_no_segment(name: str) -> None:
    assert layout.parse_number(name) is None
