"""Files with right checksums and wrong content: told as damage, or read as what they say; nothing else."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq_broker.errors import StoreError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.checkpoint import SLOT_BYTES, decode_slot, encode_slot
from qmq_broker.storage.files.snapshots import GroupsContent
from qmq_broker.storage.keepers import LogOffsets
from qmq_broker.storage.store import Store
from qmq_broker.storage.upkeep.quarantine import quarantine_damage
from qmq_broker.storage.upkeep.quarantine_report import read_reports
from qmq_broker.storage.upkeep.verify import verify_store
from qmq_client.group.actions import Acked
from qmq_client.wire.checksum import crc32c
from qmq_client.wire.errors import QmqError
from qmq_client.wire.frame import FrameKind, build_frame
from tests.broker.storage.keyed import Keyed, catch_up
from tests.crash.recording_disk import Image, PassingDisk, RecordingDisk
from tests.crash.world import records_of
from tests.fuzz.mutation import Edit, edited, edits, fuzzed, sealed, stamped, unsealed
from tests.kit.clock import FakeClock
from tests.kit.raw_page import RawPage


@functools.cache
def directory() -> Keyed:
    """A life with every kind of file: keys, groups, actions, and segments that were given up."""
    world = Keyed(RecordingDisk())
    for number in range(16):
        world.send("a", "b", None, room=100)
        world.store.step()
        world.store.actions.append([Acked(1, "orders", "billing", "one", number, number + 1)])
        world.store.actions.write_snapshot(
            world.store.actions.log.written_offset, GroupsContent(b"\x90", [RawPage(b"page")])
        )
        if number == 9:
            world.store.give_up_below(world.store.written_offset)
            kept = LogOffsets(world.store.first_offset, 0)
            world.store.keep("archive", kept, world.clock.now_ms())
    catch_up(world.store)
    world.store.close()
    return world


def image() -> Image:
    """The directory, to be changed."""
    copy = directory().disk.image.copy()
    for inode in copy.inodes.values():
        inode.durable, inode.versions = inode.seen, []
    return copy


def paths(prefix: str) -> list[str]:
    """Files of one kind."""
    names = directory().disk.image.names
    return sorted(path for path in names if path.startswith(prefix) and names[path] is not None)


def put(state: Image, path: str, content: bytes) -> None:
    number = state.names[path]
    assert number is not None
    state.inodes[number].durable = content


def content_of(path: str) -> bytes:
    content = directory().disk.image.content(directory().disk.image.names[path])
    assert content is not None
    return content


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def use(state: Image) -> None:
    """Open, read everything, search, verify: only declared errors may come of it."""
    disk = PassingDisk(state)
    with suppress(QmqError):
        verify_store(PassingDisk(state.copy()), FakeClock(), check_groups=len)
    try:
        store = Store.open(disk, FakeClock(), directory().options)
        catch_up(store, 100_000)
        for subject in store.subjects():
            records_of(store, subject)
        list(store.actions.replay())
        store.search.by_id(directory().kept[-1].message_id, 10)
        store.offset_at(directory().clock.now_ms() - 3_000)
        store.close()
    except (QmqError, AssertionError) as error:
        # `records_of` asserts that a queue is dense: with a table that says otherwise it is not.
        if not isinstance(error, QmqError) and "B8" not in str(error):
            raise


def test_the_directory_has_every_kind_of_file_and_can_be_used() -> None:
    for prefix in SMALL_FILES:
        assert paths(prefix), prefix
    for prefix in RAW_FILES:
        assert paths(prefix), prefix
    use(image())


#: Kinds of small files, by the beginning of their paths.
SMALL_FILES = (
    layout.FORMAT,
    layout.CLEAN,
    layout.QUEUE_TABLE,
    layout.RETAINED,
    layout.KEEPERS,
    "state/groups.",
    layout.INDEX_TABLE,
)
RAW_FILES = ("commitlog/", "actionlog/", "consumequeue/", "index/", "ids/", "checkpoint.")


@pytest.mark.parametrize("prefix", SMALL_FILES)
@fuzzed
@given(place=st.integers(0, 1_000), drawn=edits)
def test_B4_B13_a_small_file_that_says_something_else_is_reported_or_believed(
    prefix: str, place: int, drawn: list[Edit]
) -> None:
    state = image()
    said = [path for path in paths(prefix) if not path.endswith(layout.DRAFT_SUFFIX)]
    path = said[place % len(said)]
    put(state, path, sealed(edited(unsealed(content_of(path)), drawn)))
    use(state)


@pytest.mark.parametrize("prefix", [*RAW_FILES, *SMALL_FILES])
@fuzzed
@given(place=st.integers(0, 1_000), drawn=edits)
def test_B4_B11_a_damaged_file_of_any_kind_ends_in_a_declared_error_or_in_the_truth(
    prefix: str, place: int, drawn: list[Edit]
) -> None:
    state = image()
    path = paths(prefix)[place % len(paths(prefix))]
    put(state, path, edited(content_of(path), drawn))
    use(state)


@fuzzed
@given(st.binary(max_size=SLOT_BYTES + 8), edits)
def test_B4_a_checkpoint_slot_is_whole_or_none(noise: bytes, drawn: list[Edit]) -> None:
    assert decode_slot(noise)[0] is None
    slot = content_of(layout.CHECKPOINTS[0])
    found, store_id = decode_slot(slot)
    assert found is not None
    assert encode_slot(found, store_id) == slot
    changed = edited(slot[:-4], drawn)[: SLOT_BYTES - 4].ljust(SLOT_BYTES - 4, b"\0")
    resealed = changed + crc32c(changed).to_bytes(4, "big")
    state = image()
    for path in layout.CHECKPOINTS:
        put(state, path, resealed)
    use(state)


@fuzzed
@given(drawn=edits)
def test_B4_actions_that_mean_nothing_are_damage(drawn: list[Edit]) -> None:
    """Frames of the action log with right checksums and another content."""
    world = Keyed(RecordingDisk())
    base = world.store.actions.log.written_offset
    body = edited(b"\x00\x00\x00\x02\x91\x90" + bytes(58), drawn)
    frame = build_frame(FrameKind.ACTIONS, body, record_count=1)
    world.store.close()
    path = layout.segment_path(layout.ACTION_LOG, 0)
    state = world.disk.image.copy()
    if path not in state.names:
        return
    content = state.content(state.names[path])
    assert content is not None
    written = stamped(frame, offset=base, epoch=9, first_sequences=())
    put(state, path, content[:base] + written + content[base + len(written) :])
    try:
        store = Store.open(PassingDisk(state), FakeClock(), world.options)
        list(store.actions.replay())
    except StoreError:
        return


@fuzzed
@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(sealed)), edits)
def test_B4_reports_of_lost_ranges_and_a_quarantine_read_anything(
    report: bytes, drawn: list[Edit]
) -> None:
    state = image()
    path = layout.quarantine_path(0, 512, "json")
    state.name(layout.QUARANTINE, None)
    number = max(state.inodes) + 1
    state.inodes[number] = type(next(iter(state.inodes.values())))(report)
    state.name(path, number)
    segment = paths("commitlog/")[0]
    put(state, segment, edited(content_of(segment), drawn))
    try:
        read_reports(PassingDisk(state))
        quarantine_damage(PassingDisk(state), FakeClock())
    except StoreError:
        pass
