"""A broker whose disk is full of messages that may go."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq_broker.errors import DiskFullError
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.store import Placed
from tests.broker.service.retaining import BODY, HOUR_MS, RETAINING, keep_house, with_options
from tests.broker.service.rig import Rig, make_frame


def test_B6_a_disk_full_of_what_may_go_gets_room_without_a_message_and_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, store_options=RETAINING)
    capacity_bytes, reserve_bytes = 60_000, 10_000
    with_options(rig, dedupe_ids=1_000, dedupe_ms=HOUR_MS, reserve_bytes=reserve_bytes)

    def free_bytes(self: OsDisk) -> int:
        used = (path.stat().st_size for path in rig.directory.rglob("*") if path.is_file())
        return capacity_bytes - sum(used)

    monkeypatch.setattr(OsDisk, "free_bytes", free_bytes)
    first = make_frame([BODY])
    assert isinstance(outcome_of(rig, first), Placed)
    while isinstance(outcome_of(rig, make_frame([BODY])), Placed):
        pass
    assert keep_house(rig, ms=HOUR_MS // 4) == 0, "old, but a repeat is compared with it"
    for _ in range(2):
        assert keep_house(rig, ms=HOUR_MS // 4) > 0
    while rig.store.spare_maker.step(is_busy=False):
        pass
    again = outcome_of(rig, first)
    assert isinstance(again, Placed), again
    assert not again.duplicates, "its time is over"
    rig.kill()
    rig.start()
    for _ in range(2):
        repeated = outcome_of(rig, first)
        assert isinstance(repeated, Placed)
        assert repeated.places == again.places
    rig.restart()
    assert rig.store.recovery.clean
    rig.close()


def outcome_of(rig: Rig, frame: bytes) -> Placed | Exception:
    try:
        outcomes = rig.submit(frame)
    except DiskFullError as error:
        return error
    rig.broker.writer.step()
    rig.run_posted()
    (outcome,) = outcomes
    return outcome
