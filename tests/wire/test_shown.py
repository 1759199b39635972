"""What strangers wrote, as errors, logs and terminals show it."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from qmq_client.wire.shown import printable, shorten
from tests.wire.hostile import examples


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("größer 日本 'a\\b'", "größer 日本 'a\\b'"),
        ("a\r\nb\tc", "a\\r\\nb\\tc"),
        ("\x1b[2J\x9b2J", "\\x1b[2J\\x9b2J"),
        ("a\u2028b\u202ec", "a\\u2028b\\u202ec"),
        ("\ud800", "\\ud800"),
    ],
    ids=["nothing", "letters", "lines", "terminal", "direction", "surrogate"],
)
def test_what_steers_a_terminal_is_escaped_and_all_else_is_shown(text: str, shown: str) -> None:
    assert printable(text) == shown


@examples(100)
@given(st.text(st.characters()))
def test_any_text_becomes_printable(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert printable(shown) == shown


class Nameless:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


def bottomless() -> list[object]:
    nest: list[object] = []
    for _ in range(100_000):
        nest = [nest]
    return nest


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a\r\nb\0", "'a\\r\\nb\\x00'"),
        ("é", "'\\xe9'"),
        ("\ud800", "'\\ud800'"),
        ("x" * 60, "'" + "x" * 59 + "… (62 characters)"),
        ("x" * 1000, "'" + "x" * 60 + "'… (1000 in all)"),
        (b"\xff" * 1000, "b'" + "\\xff" * 60 + "'… (1000 in all)"),
        (10**5000, "<int>"),
        (Nameless(), "<Nameless>"),
        (bottomless(), "<list>"),
    ],
    ids=["controls", "letter", "surrogate", "long", "longer", "bytes", "int", "repr", "nest"],
)
def test_an_error_shows_any_value_printable_and_short(value: object, shown: str) -> None:
    assert shorten(value) == shown


@examples(100)
@given(st.text() | st.binary() | st.integers() | st.lists(st.text(), max_size=50))
def test_what_is_shown_is_one_bounded_line(value: object) -> None:
    shown = shorten(value)
    assert len(shown) < 360
    assert shown.replace("…", "").isascii()
    assert shown.isprintable()
