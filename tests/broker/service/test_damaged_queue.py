"""A queue that is damaged while the broker runs fails those who read it, and nothing driven by time."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.queues.consume_queue import ConsumeQueue
from qmq_client.group.queue import Place
from qmq_client.wire.names import COPIES
from tests.broker.delay.long_retry_rig import MONTH_MS, LongRetryRig
from tests.broker.service.retaining import HOUR_MS, LONG_MS, RETAINING, send
from tests.broker.service.rig import SUBJECT, Rig


def damage(monkeypatch: pytest.MonkeyPatch, subject: str) -> None:
    """From now on this queue cannot be read."""
    read = ConsumeQueue.places

    def places(self: ConsumeQueue, first: int, count: int) -> list[Place]:
        if self.subject == subject:
            raise CorruptionError(segment=f"queue of {subject}", offset=0, reason="damaged")
        return read(self, first, count)

    monkeypatch.setattr(ConsumeQueue, "places", places)


def let_a_lease_end(rig: Rig) -> list[int]:
    """Of another subject; returns the attempts of its next delivery."""
    rig.send(b"other", subject="other")
    rig.pull(subject="other", lease_ms=60_000)
    rig.clock.pass_ms(60_000)
    for _ in range(3):
        rig.broker.step()
        rig.broker.writer.step()
        rig.run_posted()
        rig.clock.pass_ms(1_000)
    return rig.pull(subject="other").attempts


@pytest.mark.parametrize("due", ["soon", "in hours"])
def test_C3_leases_end_while_the_queue_of_another_subject_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, due: str
) -> None:
    rig = Rig(tmp_path / "data", store_options=RETAINING)
    send(rig, 20)
    rig.settle(rig.pull(max_messages=1).nack(delay_ms=LONG_MS if due == "in hours" else 0))
    rig.clock.pass_ms(HOUR_MS)
    damage(monkeypatch, SUBJECT)
    assert let_a_lease_end(rig) == [2]
    monkeypatch.undo()
    rig.close()


def test_C3_D3_leases_end_while_the_queue_of_copies_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = LongRetryRig(tmp_path / "data")
    rig.start_long_retries(b"away")
    rig.clock.pass_ms(MONTH_MS)
    rig.release()
    damage(monkeypatch, COPIES)
    assert let_a_lease_end(rig) == [2]
    monkeypatch.undo()
    rig.turn()
    assert rig.pull().bodies == [b"away"]
    rig.close()
