"""What is done background the writer is over when it is, and also when it could not begin."""

from __future__ import annotations

import pytest

from qmq_broker.storage.files.background import Background, Work


def test_work_that_cannot_be_started_is_not_waited_for() -> None:
    def without_threads(_: Work) -> None:
        raise RuntimeError("can't start new thread")

    background = Background()
    background.start = without_threads
    with pytest.raises(RuntimeError):
        background.begin(lambda: None)
    assert not background.is_busy
    background.wait()
