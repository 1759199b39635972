"""What the pipeline's benchmarks read: a log that grows, and its outbox, are sound."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pipeline.logs import Filling
from benchmarks.pipeline.plain import plain_audit


def test_a_log_that_was_filled_twice_has_every_message_of_its_outbox_once(tmp_path: Path) -> None:
    filling = Filling(tmp_path / "log", outbox=tmp_path / "outbox.db")
    filling.add(1_000)
    filling.add(500)
    assert filling.messages == 1_500
    found = plain_audit(tmp_path / "log", tmp_path / "outbox.db")
    assert (found.pop("committed"), found.pop("stored")) == (1_500, 1_500)
    assert not any(found.values()), found
