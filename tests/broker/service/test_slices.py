"""Settlements in portions come to the same as all of them at once."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from qmq_broker.service.delivery import slices
from qmq_client.wire.requests import Extend, Nack, Reject, Settlement
from tests.broker.service.rig import GROUP, SUBJECT, Given, Rig

COUNT: Final = 60
EVERYTHING: Final = (0, 2**53)


def settlements(given: Given) -> list[Settlement]:
    """Ranges that overlap, repeat and name what nobody holds, with outcomes of every kind."""
    token = given.token
    return [
        Settlement(token=token, acks=tuple(given.part(index) for index in range(0, COUNT, 3))),
        Settlement(
            token=token,
            nacks=(
                Nack(range=given.part(4, 9), delay_ms=5),
                Nack(range=given.part(8, 9), delay_ms=7),
            ),
            rejects=(Reject(range=given.part(20, 10)), Reject(range=given.part(15, 20))),
            extends=(
                Extend(range=given.part(30, 9), lease_ms=100),
                Extend(range=EVERYTHING, lease_ms=900),
            ),
        ),
        Settlement(token=token, extends=(Extend(range=EVERYTHING, lease_ms=70),) * 3),
        Settlement(token=token + 1, nacks=(Nack(range=EVERYTHING),)),
        Settlement(token=token, rejects=(Reject(range=EVERYTHING),)),
    ]


def outcome(directory: Path, index: int) -> tuple[object, ...]:
    rig = Rig(directory)
    rig.send(*[b"x"] * COUNT)
    given = rig.pull(max_messages=COUNT)
    answer = rig.settle(settlements(given)[index])
    state = rig.broker.delivery.group(SUBJECT, GROUP)
    assert state is not None
    (log,) = [log for _, log in state.consumers()]
    held = {n: one.until_ms for one in log.leases() for n in range(one.first, one.next)}
    waiting = {
        n: one.retry_at_ms for one in state.redeliveries.runs() for n in range(one.first, one.next)
    }
    stale = {n for _, first, next_ in answer.stale for n in range(first, min(next_, 2 * COUNT))}
    rig.close()
    return answer.settled, stale, held, waiting, sorted(state.dead), state.acked_count


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("messages", [1, 4, 1_000])
def test_C3_portions_come_to_the_same_as_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int, messages: int
) -> None:
    whole = outcome(tmp_path / "whole", index)
    monkeypatch.setattr(slices, "RANGES_MAX", 2)
    monkeypatch.setattr(slices, "MESSAGES_MAX", messages)
    assert outcome(tmp_path / "sliced", index) == whole
