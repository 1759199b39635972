"""What a person at a terminal sees of a job under way, and what the log of a schedule gets."""

from __future__ import annotations

import io

from qmq_pipeline.display import LINE_S, Display
from qmq_pipeline.jobs.progress import Progress
from tests.pipeline.world import WallClock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def ingest_of_ten(stream: io.StringIO, *, is_quiet: bool = False) -> str:
    """What is shown of ten steps, each of which takes a third of the pause between two lines."""
    clock = WallClock()
    display = Display(stream, clock, is_quiet=is_quiet)
    display.over("starting Spark …")
    for done in range(1, 11):
        clock.sleep(LINE_S / 3)
        display.progress(Progress(stage="ingest", done=done, total=10, rows=done * 1_000))
    display.over("")
    return stream.getvalue()


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end() -> None:
    assert ingest_of_ten(io.StringIO()).splitlines() == [
        "2025-10-09T08:53:50+00:00 ingest: 3 of 10, 3,000 rows, 100/s",
        "2025-10-09T08:54:20+00:00 ingest: 6 of 10, 6,000 rows, 100/s",
        "2025-10-09T08:54:50+00:00 ingest: 9 of 10, 9,000 rows, 100/s",
        "2025-10-09T08:55:00+00:00 ingest: 10 of 10, 10,000 rows, 100/s",
    ]


def test_a_terminal_has_one_line_that_is_written_over_and_is_gone_at_the_end() -> None:
    shown = ingest_of_ten(Terminal()).split("\r\x1b[K")
    assert shown[:2] == ["", "starting Spark …"]
    assert [line.count("█") for line in shown[2:-1]] == [2, 5, 7, 10, 12, 14, 17, 19, 22, 24]
    assert shown[-1] == ""
    assert "\n" not in "".join(shown)


def test_who_wants_quiet_has_it_on_both() -> None:
    assert ingest_of_ten(io.StringIO(), is_quiet=True) == ""
    assert ingest_of_ten(Terminal(), is_quiet=True) == ""
