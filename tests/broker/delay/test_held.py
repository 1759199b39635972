"""Delayed messages whose files are damaged: who is held, what the operator is told, and how it goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from qmq_broker.service.delay import counts
from qmq_broker.service.delay.query import HeldError
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.storage.files import layout
from qmq_broker.storage.schedule.states import DelayedState
from qmq_client.commands.delayed import delayed
from qmq_client.wire.frame import FrameKind
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig
from tests.broker.delay.long_retry_rig import MONTH_MS, LongRetryRig
from tests.broker.delay.test_lost_copies import WAITED_MS, copied
from tests.broker.delay.test_shifted_clock import HOUR_MS as REAL_HOUR_MS
from tests.broker.delay.test_shifted_clock import SERVE_SHIFTED, send, status, stored
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import wait_for


def with_files(directory: Path) -> tuple[DelayRig, Path]:
    """Three messages, of two buckets, in files; and the schedule log of the first bucket."""
    rig = DelayRig(directory, queue_flush_bytes=1)
    due = {b"one": 2 * HOUR_MS, b"two": 2 * HOUR_MS + 60_000, b"other": 4 * HOUR_MS}
    rig.send_delayed({body: rig.now_ms + after for body, after in due.items()})
    rig.store.step()
    return rig, min(directory.glob("schedule/*/*"))


def spoil_marks(path: Path) -> bytes:
    """Damage the list of messages of a schedule log; what it was."""
    whole = path.read_bytes()
    path.write_bytes(whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:])
    return whole


def test_D3_a_held_bucket_holds_no_other_and_comes_once_when_its_file_is_whole_again(
    tmp_path: Path,
) -> None:
    rig, path = with_files(tmp_path)
    whole = spoil_marks(path)
    rig.restart()
    assert rig.pass_and_release(5 * HOUR_MS) == 1
    found = rig.broker.delayed.query.status()
    assert (rig.bodies(), found.pending, len(found.damaged_buckets)) == ([b"other"], 2, 1)
    assert path.name in found.held[0]
    releaser = rig.broker.delayed.releaser
    releaser.look_again(found.damaged_buckets)
    assert rig.release() == 0
    assert rig.broker.delayed.query.status().damaged_buckets == found.damaged_buckets
    mended = path.with_suffix(".mended")
    mended.write_bytes(whole)
    mended.rename(path)  # the file that was open is another one from now on
    releaser.look_again(found.damaged_buckets)
    assert rig.release() == 2
    assert rig.release() == 0
    assert rig.bodies() == [b"other", b"one", b"two"]
    found = rig.broker.delayed.query.status()
    assert (found.pending, found.damaged_buckets, found.held) == (0, [], [])
    rig.close()


def test_D4_where_a_message_was_put_off_to_is_not_known_by_the_place_it_left(
    tmp_path: Path,
) -> None:
    rig, first_path = with_files(tmp_path)
    message = next(one for one in rig.find_all() if rig.body(one) == b"one")
    assert rig.reschedule(message, message.due_at_ms + 4 * HOUR_MS)
    while rig.store.step() or rig.store.schedule.uncopied:
        pass
    query = rig.broker.delayed.query
    assert [one.state for one in query.find(message.message_id)] == [
        DelayedState.RESCHEDULED,
        DelayedState.PENDING,
    ]
    new_path = max(tmp_path.glob("schedule/*/*"))
    assert new_path != first_path
    spoil_marks(new_path)
    rig.restart()
    with pytest.raises(HeldError, match=new_path.name):
        rig.broker.delayed.query.find(message.message_id)
    rig.close()


PER_FRAME = 5
FRAMES = 4
DAMAGED = 1


def with_frames(directory: Path, *, unsorted_max: int) -> tuple[DelayRig, Path, slice]:
    """Some frames of one bucket in its file, and where the second of them stands there."""
    limits = ServiceLimits(delayed_unsorted=unsorted_max)
    rig = DelayRig(directory, limits=limits, queue_flush_bytes=1)
    for frame in range(FRAMES):
        due = {f"{frame}.{n}".encode(): rig.now_ms + 2 * HOUR_MS + n for n in range(PER_FRAME)}
        rig.send_delayed(due)
        while rig.store.step() or rig.store.schedule.uncopied:
            pass
    (bucket,) = rig.store.schedule.buckets
    frames = [
        slice(one.offset - bucket, one.offset - bucket + one.header.frame_bytes)
        for one in rig.store.schedule.files.scan(layout.SCHEDULE, bucket)
        if one.header.kind is FrameKind.SCHEDULED
    ]
    assert len(frames) == FRAMES
    (path,) = directory.glob("schedule/*/*")
    return rig, path, frames[DAMAGED]


def put(path: Path, place: slice, data: bytes) -> None:
    """Write over a part of a file."""
    with path.open("r+b") as file:
        file.seek(place.start)
        file.write(data)


HARMS: dict[str, Callable[[bytes], bytes]] = {
    "list": lambda frame: frame[:-20] + bytes([frame[-20] ^ 1]) + frame[-19:],
    "head": lambda frame: bytes([frame[0] ^ 1]) + frame[1:],
    "length": lambda frame: frame[:8] + b"\xff" * 8 + frame[16:],
    "zeros": lambda frame: bytes(len(frame)),
}


@pytest.mark.parametrize("is_sorted", [False, True], ids=["as it is", "sorted"])
@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_D3_B4_a_damaged_list_holds_the_messages_of_its_frame_and_no_others(
    tmp_path: Path, harm: Callable[[bytes], bytes], is_sorted: bool
) -> None:
    rig, path, place = with_frames(tmp_path, unsorted_max=PER_FRAME if is_sorted else 1_000)
    whole = path.read_bytes()[place]
    put(path, place, harm(whole))
    rig.restart()
    rig.send_delayed({b"late": rig.now_ms + 2 * HOUR_MS})
    query = rig.broker.delayed.query
    assert len(rig.find_all()) == (FRAMES - 1) * PER_FRAME + 1, "a question shows what can be read"
    rig.pass_and_release(HOUR_MS + HOUR_MS // 2 + HOUR_MS // 4)
    assert bool(list(tmp_path.glob("sorted/*"))) is is_sorted
    assert rig.pass_and_release(HOUR_MS // 4 + PER_FRAME) == (FRAMES - 1) * PER_FRAME + 1
    assert not [body for body in rig.bodies() if body.startswith(b"%d." % DAMAGED)]
    found = query.status()
    assert (found.pending, len(found.damaged_buckets)) == (PER_FRAME, 1)
    assert f"{path.name} is damaged at offset {place.start}" in found.held[0]
    with pytest.raises(HeldError, match=path.name):
        query.find(bytes(16))  # nobody knows whether it is there
    rig.pass_and_release(5 * HOUR_MS)
    assert path.exists(), "its files stay as long as something is held"
    put(path, place, whole)
    rig.broker.delayed.releaser.look_again(found.damaged_buckets)
    assert rig.release() == PER_FRAME
    assert rig.release() == 0
    assert len(set(rig.bodies())) == len(rig.bodies()) == FRAMES * PER_FRAME + 1
    found = query.status()
    assert (found.pending, found.damaged_buckets) == (0, [])
    rig.close()


def test_D3_what_was_hidden_behind_damage_comes_when_some_of_that_is_mended(tmp_path: Path) -> None:
    rig, path, place = with_frames(tmp_path, unsorted_max=1_000)
    whole = path.read_bytes()
    put(path, place, bytes(len(whole) - place.start))
    rig.restart()
    assert rig.pass_and_release(2 * HOUR_MS + PER_FRAME) == PER_FRAME
    put(path, place, HARMS["list"](whole[place]) + whole[place.stop :])
    rig.broker.delayed.releaser.look_again(rig.broker.delayed.query.status().damaged_buckets)
    assert rig.release() == (FRAMES - DAMAGED - 1) * PER_FRAME
    assert rig.broker.delayed.query.status().pending == PER_FRAME
    rig.close()


def test_D4_without_its_states_all_of_a_bucket_is_held_and_what_was_cancelled_never_comes(
    tmp_path: Path,
) -> None:
    rig, _ = with_files(tmp_path)
    rig.cancel(rig.find_all()[0])
    while rig.store.step() or rig.store.schedule.uncopied:
        pass
    (path,) = tmp_path.glob("dispatch/*/*")
    whole = spoil_marks(path)
    rig.restart()
    query = rig.broker.delayed.query
    assert [rig.body(one) for one in rig.find_all()] == [b"other"]
    assert rig.pass_and_release(5 * HOUR_MS) == 1
    (held,) = query.status().damaged_buckets
    path.write_bytes(whole)
    rig.broker.delayed.releaser.look_again([held])
    rig.release()
    assert rig.bodies() == [b"other", b"two"]
    rig.close()


def test_D1_looking_again_before_the_time_releases_nothing_early_and_nothing_twice(
    tmp_path: Path,
) -> None:
    rig, path = with_files(tmp_path)
    whole = spoil_marks(path)
    rig.restart()
    rig.pass_and_release(2 * HOUR_MS - 60_000)  # loaded, had it been whole
    (held,) = rig.broker.delayed.query.status().damaged_buckets
    path.write_bytes(whole)
    rig.send_delayed({b"late": rig.now_ms + 1_000})
    rig.broker.delayed.releaser.look_again([held])
    assert rig.pass_and_release(1_000) == 1
    assert rig.pass_and_release(58_999) == 0
    assert rig.pass_and_release(1) == 1
    rig.pass_and_release(3 * HOUR_MS)
    assert rig.bodies() == [b"late", b"one", b"two", b"other"]
    rig.close()


def test_a_message_that_can_be_read_again_is_released_and_no_longer_told_as_damaged(
    tmp_path: Path,
) -> None:
    rig, path = with_files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"one", b"onf"))
    rig.restart()
    assert rig.pass_and_release(5 * HOUR_MS) == 2
    assert rig.broker.delayed.query.status().damaged == 1
    path.write_bytes(whole)
    rig.broker.delayed.releaser.look_again(rig.broker.delayed.releaser.counts.damaged_by_bucket)
    assert rig.release() == 1
    found = rig.broker.delayed.query.status()
    assert (found.damaged, found.damaged_total, found.pending) == (0, 1, 0)
    rig.close()


def test_D3_more_damaged_copies_than_are_named_at_once_are_all_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "DAMAGED_MAX", 3)
    rig = LongRetryRig.forgetful(tmp_path)
    bodies = [b"bad %d" % number for number in range(10)]
    rig.start_long_retries(*bodies)
    copied(rig)
    for path in rig.directory.glob("schedule/*/*"):
        path.write_bytes(path.read_bytes().replace(b"bad ", b"worse"[:4]))
    rig.restart()
    rig.pass_and_turn(MONTH_MS)
    assert rig.broker.delayed.query.status().pending == len(bodies)
    for _ in range(8):
        rig.pass_and_turn(WAITED_MS)
    assert rig.broker.delayed.query.status().pending == 0
    assert sorted(rig.pull().bodies) == bodies
    rig.close()


def test_qmq_delayed_status_and_retry_bring_a_real_broker_on_without_a_restart(
    tmp_path: Path,
) -> None:
    shift, data = tmp_path / "shift", tmp_path / "data"
    shift.write_text("0")
    arguments = ("--shift", str(shift))

    def run(command: str, broker: BrokerProcess) -> tuple[int, str]:
        ran = CliRunner().invoke(delayed, [command, "--broker", broker.url])
        return ran.exit_code, ran.output

    with BrokerProcess(data, *arguments, command=SERVE_SHIFTED) as broker:
        send(broker, 2 * REAL_HOUR_MS, 2 * REAL_HOUR_MS)
        assert broker.stop() == 0
    (path,) = data.glob("schedule/*/*")
    whole = spoil_marks(path)
    shift.write_text(str(3 * REAL_HOUR_MS))
    with BrokerProcess(data, *arguments, command=SERVE_SHIFTED) as broker:
        wait_for(lambda: status(broker)["damaged_buckets"], "the damage")
        code, told = run("status", broker)
        assert code == 1
        assert path.name in told
        path.write_bytes(whole)
        assert run("retry", broker)[1].startswith("reading again ")
        wait_for(lambda: stored(broker) == 2, "what was held")
        assert run("status", broker)[0] == 0
        assert run("retry", broker) == (0, "no messages are held\n")
        shift.write_text("0")  # the clock is set back, and the operator is told
        wait_for(lambda: run("status", broker)[0] == 1, "the alarm")
        assert broker.stop() == 0
