"""What storage may cost, counted and not timed: syncs, reads, writes, bytes."""

from __future__ import annotations

import pytest

from qmq_broker.options import StoreOptions
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.format_file import read_format
from qmq_broker.storage.logs.frame_scan import SCAN_BLOCK_BYTES, FrameScan
from qmq_broker.storage.logs.kinds import COMMIT_KINDS
from qmq_broker.storage.logs.segments import Segments
from qmq_broker.storage.store import Store
from qmq_client.group.actions import Acked
from qmq_client.wire.frame import MessageFrame, build_message_frame, parse_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import Record, encode_record
from tests.crash.recording_disk import RecordingDisk
from tests.crash.world import make_frame
from tests.kit.clock import FakeClock

OPTIONS = StoreOptions(reserve_bytes=0, growth_bytes=2 * 1024 * 1024)
#: Of one message, over its subject, key, tags, headers, body and id.
LONE_BYTES_MAX = 150
BATCHED_BYTES_MAX = 60


def open_store() -> tuple[Store, RecordingDisk]:
    """A store whose first segment and room are taken."""
    disk = RecordingDisk()
    store = Store.open(disk, FakeClock(), OPTIONS)
    store.append([make_frame(MessageIds(1), {"first": 0})])
    store.commit_and_step()
    disk.calls.clear()
    return store, disk


@pytest.mark.parametrize("frames", [1, 7, 100])
def test_one_group_commit_is_one_write_and_one_sync(frames: int) -> None:
    store, disk = open_store()
    ids = MessageIds(7)
    for _ in range(5):
        disk.calls.clear()
        store.append([make_frame(ids, {"orders": [10, 20], "invoices": 5}) for _ in range(frames)])
        assert disk.calls == {"write": 1}
        store.commit_and_step()
        assert disk.calls == {"write": 1, "sync": 1}


def test_a_sync_of_nothing_costs_nothing() -> None:
    store, disk = open_store()
    store.commit_and_step()
    assert store.append([]) == []
    store.commit_and_step()
    assert disk.calls == {}


def test_an_append_of_actions_is_one_write_and_its_sync_one_sync() -> None:
    store, disk = open_store()
    store.actions.append([])
    assert disk.calls == {}
    actions = [Acked(1, "orders", "billing", "one", n, n + 1) for n in range(100)]
    store.actions.append(actions)
    disk.calls.clear()
    store.actions.append(actions)
    store.actions.sync()
    assert disk.calls == {"write": 1, "sync": 1}


@pytest.mark.parametrize("per_frame", [1, 10, 500])
def test_a_thousand_neighbouring_messages_are_read_with_two_reads(per_frame: int) -> None:
    store, disk = open_store()
    ids = MessageIds(7)
    store.append(
        [make_frame(ids, {"orders": [1024] * per_frame}) for _ in range(1_000 // per_frame)]
    )
    store.commit_and_step()
    store.close()
    store = Store.open(disk, FakeClock(), OPTIONS)
    queue = store.queue("orders")
    assert queue is not None
    disk.calls.clear()
    records = store.read_records(queue.entries(0, 1_000), subject="orders")
    assert len(records) == 1_000
    assert disk.calls["read"] <= 2


class CountedSegments(Segments):
    """Segments that know how much was read of them."""

    read_bytes = 0

    def read(self, offset: int, count: int) -> bytes:
        data = super().read(offset, count)
        self.read_bytes += len(data)
        return data


@pytest.mark.parametrize("body_bytes", [100, 1_100, 3_000])
def test_a_scan_of_long_frames_of_one_length_reads_them_once(body_bytes: int) -> None:
    store, disk = open_store()
    ids = MessageIds(7)
    first = store.written_offset
    for _ in range(20):
        store.append([make_frame(ids, {"orders": [body_bytes] * 500})])
    store.commit_and_step()
    kept = read_format(disk)
    assert kept is not None
    segments = CountedSegments(disk, layout.COMMIT_LOG, kept.segment_bytes)
    scan = FrameScan(segments, COMMIT_KINDS, store_id=kept.store_id, first_offset=first)
    assert sum(len(frame.data) for frame in scan) == store.written_offset - first
    # A first frame that was cut, and the end of the log, which is looked for behind the last one.
    spare = 2 * SCAN_BLOCK_BYTES + 2 * 500 * body_bytes
    assert segments.read_bytes <= store.written_offset - first + spare
    store.close()


def test_frames_of_a_scan_stand_in_what_was_read_and_are_copied_when_that_is_asked_for() -> None:
    store, disk = open_store()
    ids = MessageIds(7)
    first = store.written_offset
    stored = store.append([make_frame(ids, {"orders": [100] * 500}) for _ in range(3)])
    store.commit_and_step()
    kept = read_format(disk)
    assert kept is not None
    segments = Segments(disk, layout.COMMIT_LOG, kept.segment_bytes)
    frames = list(FrameScan(segments, COMMIT_KINDS, store_id=kept.store_id, first_offset=first))
    assert len(frames) == len(stored) == 3
    assert frames[0].block is frames[1].block is frames[2].block
    for frame in frames:
        assert frame.view.obj is frame.block
        assert frame.data == bytes(frame.view) == segments.read(frame.offset, len(frame.view))
        assert len(frame.data) == frame.header.frame_bytes
    store.close()


def message_frame(ids: MessageIds, count: int) -> tuple[MessageFrame, int]:
    """Messages of everyday size, and the bytes that are theirs."""
    subject, key, tag, header, body = (
        "flight.departed",
        "N14228",
        "late",
        ("carrier", "UA"),
        bytes(200),
    )
    records = [
        encode_record(
            Record(
                message_id=ids.next_id(),
                subject=subject,
                key=key,
                tags=(tag,),
                headers=(header,),
                body=body,
                born_at_ms=1_357_034_220_017,
            )
        )
        for _ in range(count)
    ]
    own = len(subject) + len(key) + len(tag) + len("".join(header)) + len(body) + 16
    return parse_message_frame(build_message_frame({subject: records})), own


@pytest.mark.parametrize(("per_frame", "limit"), [(1, LONE_BYTES_MAX), (100, BATCHED_BYTES_MAX)])
def test_bytes_on_disk_of_a_message_are_few_over_its_own(per_frame: int, limit: int) -> None:
    store, disk = open_store()
    ids = MessageIds(7)
    first = store.written_offset
    messages = 2_000
    frames = [message_frame(ids, per_frame) for _ in range(messages // per_frame)]
    store.append([frame for frame, _ in frames])
    own = sum(own_bytes * per_frame for _, own_bytes in frames)
    log_bytes = store.written_offset - first
    store.commit_and_step()
    store.close()
    queue_bytes = disk.open(layout.queue_path("flight.departed", 0)).length()
    assert queue_bytes == 20 * messages
    over = (log_bytes + queue_bytes - own) / messages
    print(f"{over:.1f} bytes over a message's own, {per_frame} in a frame")
    assert over <= limit


def test_an_idle_broker_is_small() -> None:
    disk = RecordingDisk()
    Store.open(disk, FakeClock(), StoreOptions()).close()
    content = sum(len(inode.seen) for inode in disk.image.inodes.values())
    assert content < 16 * 1024


def test_a_start_after_a_clean_stop_reads_no_old_segment() -> None:
    store, disk = open_store()
    ids = MessageIds(7)
    store.append([make_frame(ids, {"orders": [1000] * 10}) for _ in range(200)])
    store.commit_and_step()
    store.close()
    # Far more than the window remembers, so that a start needs none of it.
    store = Store.open(disk, FakeClock(), StoreOptions(reserve_bytes=0, dedupe_ids=0))
    assert store.recovery.scanned_bytes < 20_000
