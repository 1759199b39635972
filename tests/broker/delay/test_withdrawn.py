"""D4: what was withdrawn before the broker knew it stays out, however late an earlier send arrives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.upkeep.verify import verify_store
from qmq_client.wire.frame import FrameKind, build_message_frame
from qmq_client.wire.message_id import format_message_id
from qmq_client.wire.record import Record, encode_record
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig
from tests.broker.face.asgi import Client
from tests.broker.face.delayed import cancel
from tests.broker.service.rig import SUBJECT
from tests.kit.clock import FakeClock

IDS = [number.to_bytes(16) for number in (7, 8, 9)]
TEXTS = [format_message_id(one) for one in IDS]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DelayRig]:
    made = DelayRig(tmp_path / "data")
    made.send(b"first")
    yield made
    made.close()


@pytest.fixture
def client(rig: DelayRig) -> Client:
    return Client(rig)


def frame_of(rig: DelayRig, *message_ids: bytes, kind: FrameKind, body: bytes = b"b") -> bytes:
    due_at_ms = rig.clock.wall_ms + HOUR_MS if kind is FrameKind.DELAYED else None
    records = [
        Record(message_id=one, subject=SUBJECT, body=body, born_at_ms=1, due_at_ms=due_at_ms)
        for one in message_ids
    ]
    return build_message_frame({SUBJECT: [encode_record(one) for one in records]}, kind=kind)


def arrive(rig: DelayRig, frame: bytes) -> Any:
    """What became of a request."""
    outcomes = rig.submit(frame)
    rig.commit()
    return outcomes[0]


def left_out(rig: DelayRig, *message_ids: bytes, kind: FrameKind = FrameKind.DELAYED) -> int:
    """How many of these messages the broker takes for known when they arrive."""
    duplicates: int = arrive(rig, frame_of(rig, *message_ids, kind=kind)).duplicates
    return duplicates


@pytest.mark.parametrize("kind", [FrameKind.MESSAGES, FrameKind.DELAYED], ids=str)
def test_D4_a_send_that_arrives_after_its_message_was_withdrawn_is_not_stored(
    rig: DelayRig, client: Client, kind: FrameKind
) -> None:
    frame = frame_of(rig, IDS[0], kind=kind)
    assert cancel(client, TEXTS[0], subject=SUBJECT, withdrawn=True) == ["unknown"]
    placed = arrive(rig, frame)
    assert (placed.duplicates, placed.places) == (1, ()), "the sender is told that it is there"
    assert rig.pass_and_release(2 * HOUR_MS) == 0
    assert rig.bodies() == [b"first"]


@pytest.mark.parametrize("kind", [FrameKind.MESSAGES, FrameKind.DELAYED], ids=str)
def test_D4_the_other_messages_of_such_a_send_are_stored(
    rig: DelayRig, client: Client, kind: FrameKind
) -> None:
    assert cancel(client, TEXTS[1], subject=SUBJECT, withdrawn=True) == ["unknown"]
    placed = arrive(rig, frame_of(rig, *IDS, kind=kind))
    assert placed.duplicates == 1
    assert sum(place.count for place in placed.places) == (0 if kind is FrameKind.DELAYED else 2)
    assert left_out(rig, *IDS, kind=kind) == 3
    rig.pass_and_release(2 * HOUR_MS)
    assert len(rig.bodies()) == 3


def test_D4_what_is_sent_under_that_id_with_other_content_is_not_stored_either(
    rig: DelayRig, client: Client
) -> None:
    cancel(client, TEXTS[0], subject=SUBJECT, withdrawn=True)
    for body in (b"one", b"other"):
        frame = frame_of(rig, IDS[0], kind=FrameKind.MESSAGES, body=body)
        assert arrive(rig, frame).duplicates == 1


@pytest.mark.parametrize("end", ["stop", "kill", "without the journal of ids"])
def test_D4_what_was_withdrawn_stays_out_over_a_restart(
    rig: DelayRig, client: Client, end: str
) -> None:
    cancel(client, *TEXTS[:2], subject=SUBJECT, withdrawn=True)
    if end == "stop":
        rig.restart()
    elif end == "kill":
        rig.kill()
    else:
        rig.close()
        for path in (rig.directory / layout.IDS).iterdir():
            path.unlink()
        rig.start()
    assert left_out(rig, *IDS) == 2
    rig.restart()
    assert left_out(rig, *IDS) == 3


def test_D4_what_the_broker_knows_is_cancelled_or_too_late_as_ever(
    rig: DelayRig, client: Client
) -> None:
    assert left_out(rig, IDS[0]) == 0
    assert left_out(rig, IDS[1], kind=FrameKind.MESSAGES) == 0
    answer = cancel(client, *TEXTS, subject=SUBJECT, withdrawn=True)
    assert answer == ["cancelled", "too_late", "unknown"]
    assert cancel(client, *TEXTS, subject=SUBJECT, withdrawn=True) == answer
    assert left_out(rig, IDS[0]) == left_out(rig, IDS[1], kind=FrameKind.MESSAGES) == 1


def test_O1_what_its_outbox_may_still_send_is_stored_although_somebody_asked_for_it(
    rig: DelayRig, client: Client
) -> None:
    assert cancel(client, TEXTS[0]) == ["unknown"]
    assert left_out(rig, IDS[0]) == 0


def test_B7_a_withdrawn_id_is_forgotten_with_its_window(tmp_path: Path) -> None:
    rig = DelayRig(tmp_path / "small", dedupe_ids=1)
    cancel(Client(rig), TEXTS[0], subject=SUBJECT, withdrawn=True)
    for _ in range(20):
        rig.send(b"other")
    assert left_out(rig, IDS[0]) == 0
    rig.close()
    rig = DelayRig(tmp_path / "none", dedupe_ids=0)
    before = rig.store.written_offset
    cancel(Client(rig), TEXTS[0], subject=SUBJECT, withdrawn=True)
    assert left_out(rig, IDS[0]) == 0 < rig.store.written_offset - before
    rig.close()


def test_a_withdrawal_is_written_once_and_its_log_is_sound(rig: DelayRig, client: Client) -> None:
    cancel(client, *TEXTS[:2], subject=SUBJECT, withdrawn=True)
    before = rig.store.written_offset
    cancel(client, *TEXTS[:2], subject=SUBJECT, withdrawn=True)
    assert rig.store.written_offset == before
    cancel(client, *TEXTS[:2], TEXTS[1], subject=SUBJECT, withdrawn=True)
    assert rig.store.written_offset == before
    rig.close()
    disk = OsDisk(str(rig.directory))
    assert verify_store(disk, FakeClock(), check_groups=len).faults == []
    disk.close()
    rig.start()
