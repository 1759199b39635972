"""B11 for the key index: whatever a power cut leaves of it, no answer changes after it is made again."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from qmq_broker.storage.files import layout
from qmq_broker.storage.index.key_index_file import IndexFile
from qmq_broker.storage.store import Store
from qmq_client.wire.errors import QmqError
from tests.broker.storage.keyed import INDEXED, Kept, Keyed, catch_up, check_answers
from tests.crash.enumeration import SEED, Sample
from tests.crash.planted import ForgetfulDisk
from tests.crash.power_cut import cut_states
from tests.crash.recording_disk import Image, RecordingDisk, images
from tests.kit.clock import FakeClock

#: The table is written after little log, so that growing files are noted too.
NOTING = replace(INDEXED, queue_flush_bytes=700)
#: A default run checks one in so many crash states.
CHECKED = 5
#: Operations before a message was acknowledged, and the message.
Acknowledged = list[tuple[int, Kept]]
Life = Callable[[RecordingDisk], tuple[Keyed, Acknowledged]]


def growing(disk: RecordingDisk) -> tuple[Keyed, Acknowledged]:
    """Messages and steps in turn, a clean stop, a kill, and more."""
    world, known = Keyed(disk, options=NOTING), []
    for round_ in range(3):
        for keys in (("a", "b"), ("a", None, "c"), ("d", "d", "a")):
            known += _sent(world, *keys)
            world.catch_up()
        if round_ == 0:
            world.store.close()
        if round_ < 2:
            world = world.again()
    return world, known


def given_up(disk: RecordingDisk) -> tuple[Keyed, Acknowledged]:
    """Files go with the log that they cover."""
    world, known = Keyed(disk, options=NOTING), []
    for _ in range(9):
        known += _sent(world, "a", "b", room=250)
        world.catch_up()
        world.clock.pass_ms(1_100)
        world.store.step()
    assert world.store.give_up_below(world.store.written_offset) > 0
    known += _sent(world, "c")
    world.catch_up()
    return world, known


def _sent(world: Keyed, *keys: str | None, room: int = 60) -> Acknowledged:
    kept = world.send(*keys, room=room)
    return [(len(world.disk.operations), one) for one in kept]


def crash_everywhere(life: Life, disk: RecordingDisk, *, one_in: int = CHECKED) -> int:
    """Check the crash states of a life, or a sample; returns how many there were."""
    rng, sample = random.Random(SEED), Sample(one_in)
    world, known = life(disk)
    states = 0
    for count, image in images(disk.first_image, disk.operations):
        for state in cut_states(image, rng, scattered=2):
            states += 1
            if sample.takes_next():
                _check(state, [one for at, one in known if at <= count], world.kept)
    return states


def _check(state: Image, acknowledged: list[Kept], sent: list[Kept]) -> None:
    store = Store.open(RecordingDisk(state), FakeClock(), NOTING)
    # What was sent and not acknowledged may be there or not: the queue says which.
    queue = store.queue("orders")
    count = 0 if queue is None else queue.next_sequence
    there = [one for one in sent if one.place.sequence < count]
    assert len(there) >= len(acknowledged)
    for one in there:
        result = store.search.by_id(one.message_id, 10)
        is_kept = one.place.physical_offset >= store.first_offset
        assert result.found == ([one.place] if is_kept else []) or not result.is_complete
    catch_up(store, 10_000)
    assert not store.index.fault
    assert store.index.indexed_offset == store.durable_offset
    check_answers(store, there)


@pytest.mark.parametrize(("life", "states"), [(growing, 600), (given_up, 660)])
def test_B11_a_power_cut_changes_no_answer_of_the_key_index(
    life: Life, states: int, one_in: int
) -> None:
    found = crash_everywhere(life, RecordingDisk(), one_in=min(one_in, CHECKED))
    print(f"{found} crash states, seed {SEED}")
    assert found >= states


def test_B11_any_index_file_may_be_torn_or_deleted_at_any_point() -> None:
    rng = random.Random(SEED)
    disk = RecordingDisk()
    world, known = growing(disk)
    for count, image in images(disk.first_image, disk.operations):
        if count % 5:
            continue
        paths = [path for path in image.names if path.startswith((layout.INDEX, "state/index"))]
        for path in [path for path in paths if image.names[path] is not None]:
            _check(_harmed(image, path, rng), [one for at, one in known if at <= count], world.kept)


def _harmed(image: Image, path: str, rng: random.Random) -> Image:
    state = image.copy()
    number = state.names[path]
    assert number is not None
    content = state.inodes[number].seen
    if rng.random() < 0.3:
        state.name(path, -1)
    else:
        first = rng.randrange(len(content) + 1)
        after = rng.randrange(first, len(content) + 1)
        torn = content[:first] + bytes(after - first) + content[after:]
        state.change(number, torn if rng.random() < 0.7 else content[:first])
    return state


def is_found(disk: RecordingDisk) -> bool:
    """Whether crashing a life shows a wrong answer."""
    try:
        crash_everywhere(growing, disk)
    except (AssertionError, QmqError):
        return True
    return False


@pytest.mark.parametrize("path", [f"{layout.INDEX}/", layout.draft_path(layout.INDEX_TABLE)])
def test_syncs_that_are_forgotten_cost_time_and_no_answer(path: str) -> None:
    """Checksums tell what did not reach the disk, so even this is harmless."""
    assert not is_found(ForgetfulDisk("sync", path))


def test_what_the_index_has_noted_is_not_made_again_after_a_power_cut() -> None:
    disk = RecordingDisk()
    world = Keyed(disk, options=NOTING)
    world.send("a", "b", "c")
    world.catch_up()
    world.store.index.finish()
    everything_unsynced_lost = next(cut_states(disk.image, random.Random(SEED), scattered=0))
    store = Store.open(RecordingDisk(everything_unsynced_lost), FakeClock(), NOTING)
    done = [store.index.step(10_000) for _ in range(10)]
    assert not done[-1].is_unfinished
    assert sum(one.messages for one in done) == 0, "the files hold what the table says"
    assert store.index.indexed_offset >= world.store.index.indexed_offset


def test_an_index_file_that_is_believed_unread_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def believe(file: IndexFile) -> bool:
        file.is_checked = True
        return True

    monkeypatch.setattr(IndexFile, "check_some", believe)
    assert is_found(ForgetfulDisk("sync", f"{layout.INDEX}/"))
