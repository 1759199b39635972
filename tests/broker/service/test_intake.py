"""What every send passes before anything is written, and what a broker says that takes none."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq_broker.errors import (
    BusyError,
    DiskFullError,
    InvalidRecordError,
    UnavailableError,
)
from qmq_broker.options import StoreOptions
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.serving import Serving, ServingState
from qmq_client.wire.errors import InvalidMessageError, ProtocolError
from qmq_client.wire.frame import FrameKind, build_frame, build_message_frame
from qmq_client.wire.record import Record, encode_record
from tests.broker.service.rig import SUBJECT, Rig, make_frame, new_ids
from tests.broker.storage.later import with_flags


def test_B6_below_the_reserve_nothing_is_taken_and_pulls_continue(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data")
    rig.send(b"a")
    rig.close()
    rig = Rig(tmp_path / "data", store_options=StoreOptions(
        segment_bytes=16 * 1024 * 1024, reserve_bytes=2**40
    ))  # fmt: skip
    with pytest.raises(DiskFullError, match="reserve"):
        rig.submit(make_frame([b"b"]))
    given = rig.pull()
    assert given.bodies == [b"a"]
    assert rig.settle(given.ack()).settled == 1
    rig.close()


def test_B6_requests_between_two_looks_at_the_disk_use_up_the_room_that_was_seen(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = make_frame([b"a"])
    seen = [2 * len(frame), 0]
    monkeypatch.setattr(rig.store.disk, "free_bytes", lambda: seen.pop(0))
    for _ in range(2):
        rig.broker.intake.check(frame)
    with pytest.raises(DiskFullError, match="reserve"):
        rig.broker.intake.check(frame)


def test_a_broker_that_takes_no_messages_says_so_before_it_looks_at_disk_and_request(
    tmp_path: Path,
) -> None:
    options = StoreOptions(segment_bytes=16 * 1024 * 1024, reserve_bytes=2**40)
    rig = Rig(tmp_path / "data", store_options=options)
    with pytest.raises(DiskFullError):
        rig.broker.intake.check(b"no frame")
    rig.broker.serving.become(Serving.READ_ONLY, "an operator's wish")
    with pytest.raises(UnavailableError, match="read-only: an operator's wish"):
        rig.broker.intake.check(b"no frame")
    rig.close()


def test_B10_subjects_are_bounded_and_known_ones_continue(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data", limits=ServiceLimits(subjects=2))
    rig.send(b"a", subject="one")
    rig.restart()
    rig.send(b"a", subject="two")
    with pytest.raises(
        BusyError, match=r"2 subjects, and this request has 1 new .* allowed: 2\. Use"
    ):
        rig.submit(make_frame([b"a"], subject="three"))
    rig.send(b"b", subject="one")
    assert rig.store.subjects() == ["one", "two"]
    rig.close()


def test_B10_a_refused_request_uses_up_no_subject(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data", limits=ServiceLimits(subjects=2, commit_queue_age_ms=1))
    rig.submit(make_frame([b"a"], subject="one"))
    rig.pass_ms(10)
    with pytest.raises(BusyError, match="waited"):
        rig.submit(make_frame([b"a"], subject="refused"))
    rig.broker.writer.step()
    rig.run_posted()
    rig.send(b"a", subject="two")
    assert rig.store.subjects() == ["one", "two"]
    rig.close()


@pytest.mark.parametrize("last", [Serving.DRAINING, Serving.POISONED])
def test_a_broker_that_stops_or_has_failed_never_serves_again(last: Serving) -> None:
    serving = ServingState()
    assert serving.become(Serving.READ_ONLY, "an operator's wish")
    assert serving.become(last, "the reason")
    for state in (Serving.SERVING, Serving.READ_ONLY, last):
        assert not serving.become(state, "another reason")
    assert (serving.state, serving.reason) == (last, "the reason")


@pytest.mark.parametrize("state", [Serving.DRAINING, Serving.POISONED])
def test_a_broker_that_does_not_take_messages_says_in_which_state_it_is(
    rig: Rig, state: Serving
) -> None:
    rig.broker.serving.become(state, "a reason")
    with pytest.raises(UnavailableError, match=f"{state}: a reason") as refused:
        rig.submit(make_frame([b"a"]))
    assert refused.value.state == state


def test_a_record_altered_on_its_way_is_refused_by_its_id(rig: Rig) -> None:
    ids = new_ids(7)
    good = [Record(message_id=next(ids), subject=SUBJECT, body=b"x", born_at_ms=1)] * 2
    records = [encode_record(record) for record in good]
    records[1] = records[1][:-1] + b"y"
    with pytest.raises(InvalidRecordError, match="record 1") as refused:
        rig.submit(build_message_frame({SUBJECT: records}))
    assert refused.value.message_id == good[1].message_id.hex()


@pytest.mark.parametrize("flags", [0b11, 0b10000, 0x80])
@pytest.mark.parametrize("is_delayed", [False, True])
def test_B13_a_record_that_only_a_later_version_can_read_is_refused_by_its_id(
    rig: Rig, is_delayed: bool, flags: int
) -> None:
    """What was stored could be read by no consumer, and by no command."""
    ids = new_ids(7)
    due_at_ms = rig.now_ms + 60_000 if is_delayed else None
    good = [
        Record(message_id=next(ids), subject=SUBJECT, body=b"x", born_at_ms=1, due_at_ms=due_at_ms)
        for _ in range(3)
    ]
    records = [encode_record(record) for record in good]
    records[1] = with_flags(records[1], flags)
    kind = FrameKind.DELAYED if is_delayed else FrameKind.MESSAGES
    with pytest.raises(InvalidRecordError, match=r"record 1 .* has flags") as refused:
        rig.submit(build_message_frame({SUBJECT: records}, kind=kind))
    assert refused.value.message_id == good[1].message_id.hex()
    assert rig.broker.writer.step().requests == 0


def test_what_is_no_frame_of_messages_is_refused_before_anything_is_written(rig: Rig) -> None:
    frame = make_frame([b"a"])
    for damaged in (b"", frame[:-1], frame[:40], b"\0" * 100, frame[:-8] + b"\1" * 8):
        with pytest.raises(ProtocolError):
            rig.submit(damaged)
    with pytest.raises(ProtocolError):
        rig.submit(build_frame(FrameKind.CONTROL, b""))
    records = [
        encode_record(
            Record(message_id=bytes(16), subject="a", body=b"", born_at_ms=1, due_at_ms=2)
        )
    ]
    with pytest.raises(InvalidMessageError, match="DELAYED"):
        rig.submit(build_message_frame({"a": records}))
    assert rig.broker.writer.step().requests == 0
