"""What strangers wrote, as errors, logs and terminals show it."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime

import hypothesis.strategies as st
import pytest
from hypothesis import given

from qmq_client.wire.shown import printable, shorten, utc_text
from tests.kit.broker_process import ROOT
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


def test_times_of_log_lines_have_milliseconds_and_a_zone() -> None:
    assert utc_text(1_767_323_045.6789) == "2026-01-02T03:04:05.678Z"
    assert utc_text(0) == "1970-01-01T00:00:00.000Z"


@pytest.mark.parametrize("start", ["broker", "commands"])
def test_log_lines_of_every_process_begin_with_such_a_time_whatever_the_zone(start: str) -> None:
    script = {
        "broker": "from qmq_broker.face.logs import start_logging; start_logging(20)",
        "commands": "from qmq_client.commands.logs import log_to_stderr; log_to_stderr('info')",
    }[start]
    ran = subprocess.run(
        [sys.executable, "-c", f"{script}; import logging; logging.warning('here')"],
        env=dict(os.environ, TZ="Asia/Tokyo", PYTHONPATH=f"{ROOT}:{ROOT / 'broker'}"),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    stamp, rest = ran.stderr.split(" ", 1)
    off_s = datetime.now(UTC).timestamp() - datetime.fromisoformat(stamp).timestamp()
    assert stamp.endswith("Z")
    assert abs(off_s) < 3_600  # another zone would be off by nine hours
    assert rest.strip() == "WARNING root here"
