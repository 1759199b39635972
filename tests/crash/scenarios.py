"""What brokers do, as short lives on a recording disk; each operation of them is a place to crash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from qmq_broker.errors import NoRoomError, PoisonedError
from qmq_broker.storage.files.background import Work
from tests.crash.recording_disk import UNLIMITED, RecordingDisk
from tests.crash.world import RETAINING, History, World
from tests.kit.clock import FakeClock

Scenario = Callable[[RecordingDisk], World]

#: As many operations at the end of `retention_once` give the segment up.
GIVING_UP = 20


def first_start(disk: RecordingDisk) -> World:
    """An empty disk becomes a data directory and takes its first message."""
    world = World(disk)
    world.send(world.frame(orders=30))
    return world


def lone_messages(disk: RecordingDisk) -> World:
    """One message, one commit, again and again."""
    world = World(disk)
    for count in range(8):
        world.send(world.frame(orders=count * 20))
    return world


def group_commits(disk: RecordingDisk) -> World:
    """Several requests in one commit, several subjects in one request."""
    world = World(disk)
    for _ in range(3):
        world.send(
            world.frame(orders=[10, 20, 30], Invoices=[40]),
            world.frame(Invoices=[5] * 3),
            world.frame(orders=[90]),
        )
    return world


def appends_before_a_sync(disk: RecordingDisk) -> World:
    """Several writes that wait for one sync."""
    world = World(disk)
    for _ in range(3):
        world.append(world.frame(orders=100))
        world.append(world.frame(orders=600), world.frame(payments=[1, 2, 3]))
        world.append(world.frame(orders=30))
        world.sync()
    return world


def rolls(disk: RecordingDisk) -> World:
    """Frames of many lengths over several segments, also several in one append."""
    world = World(disk)
    for length in (700, 900, 500, 1500, 10):
        world.send(world.frame(orders=length))
    world.send(*(world.frame(orders=800) for _ in range(3)))
    return world


def exact_fits(disk: RecordingDisk) -> World:
    """Frames that end exactly with their segment."""
    world = World(disk)
    for length in (400, 1, 900):
        world.send(world.frame(orders=length))
        # A lone record of `orders` costs 126 bytes beside its body, before the fill.
        room_bytes = 2048 - world.store.written_offset % 2048
        world.send(world.frame(orders=room_bytes - 126))
        assert world.store.written_offset % 2048 == 0
    return world


def checkpoints_and_flushes(disk: RecordingDisk) -> World:
    """Time passes between commits, so that slots, queue files and their table are written."""
    world = World(disk)
    for _ in range(7):
        world.send(world.frame(orders=[150] * 3, invoices=[60]))
        world.clock.pass_ms(700)
        world.store.step()
    return world


def actions_among_messages(disk: RecordingDisk) -> World:
    """Both logs in turn; the action log rolls too."""
    world = World(disk)
    for count in range(5):
        world.send(world.frame(orders=40))
        world.act(3)
        if count % 2:
            world.sync_actions()
        world.act(2)
        world.clock.pass_ms(600)
    world.sync_actions()
    return world


def repeats(disk: RecordingDisk) -> World:
    """Requests that are sent again, alone and mixed with new messages."""
    world = World(disk)
    first = world.frame(orders=[10, 20], invoices=[30])
    world.send(first)
    world.send(first, world.frame(orders=[40]))
    second = world.frame(orders=[50])
    world.append(second)
    world.append(second, world.frame(invoices=[60]))
    world.sync()
    world.send(second)
    return world


def clean_stops(disk: RecordingDisk) -> World:
    """Stopped in order and started again, twice, on one disk."""
    world = World(disk)
    for _ in range(2):
        world.send(world.frame(orders=[200, 300]))
        world.act()
        world.store.close()
        world = next_life(world, disk)
    world.send(world.frame(orders=[10]))
    return world


def kills(disk: RecordingDisk) -> World:
    """Killed with requests under way, restarted, again and again; the power stays on."""
    world = World(disk)
    for length in (100, 700, 1200):
        world.send(world.frame(orders=length))
        world.append(world.frame(orders=length // 2), world.frame(invoices=20))
        world.act(2)
        disk.unlock()
        world = after_kill(world)
    world.send(world.frame(orders=5))
    return world


def restarts_without_messages(disk: RecordingDisk) -> World:
    """Started and killed, started and stopped: only epochs are used up."""
    world = World(disk)
    disk.unlock()
    world = next_life(world, disk)
    world.store.close()
    world = next_life(world, disk)
    disk.unlock()
    return next_life(world, disk)


def retention(disk: RecordingDisk) -> World:
    """Old segments are given up while new ones are written, some of them over the old ones."""
    world = _retaining(disk)
    given_up_bytes = 0
    for round_ in range(20):
        _send_and_wait(world, 300 + 10 * round_)
        if round_ % 4 == 3:
            given_up_bytes += world.give_up()
    assert given_up_bytes >= 3 * 2048
    return world


def retention_once(disk: RecordingDisk) -> World:
    """Ends when the first segment is given up."""
    world = _retaining(disk)
    for _ in range(5):
        _send_and_wait(world, 500)
    assert world.give_up() > 0
    return world


def retention_beside_the_writer(disk: RecordingDisk) -> World:
    """Segments are given up while the disk takes its time: what is sent meanwhile rolls over spares."""
    world = _retaining(disk)
    waiting: list[Work] = []
    world.store.retention.background.start = waiting.append
    for round_ in range(16):
        _send_and_wait(world, 300 + 10 * round_)
        if round_ % 5 == 4:
            world.give_up()
        while waiting and round_ % 3 == 2:
            waiting.pop(0)()
            world.store.step()
    assert world.store.first_offset >= 2048
    disk.unlock()
    world = after_kill(world)
    world.send(world.frame(orders=5))
    return world


def retention_of_a_quiet_subject(disk: RecordingDisk) -> World:
    """A subject loses its last message, and goes on where it was."""
    world = _retaining(disk)
    world.send(world.frame(quiet=[40, 50]))
    for round_ in range(9):
        _send_and_wait(world, 500)
        if round_ == 7:
            assert world.give_up() > 0
    world.send(world.frame(quiet=60))
    return world


def kills_among_recycled_segments(disk: RecordingDisk) -> World:
    """Killed with requests under way in segments that hold old frames."""
    world = _retaining(disk)
    for life in range(3):
        for _ in range(7):
            _send_and_wait(world, 400)
        assert world.give_up() > 0
        for length in (350, 500, 90):
            world.append(world.frame(orders=length), world.frame(invoices=life))
        disk.unlock()
        world = after_kill(world)
    world.send(world.frame(orders=5))
    return world


def snapshots(disk: RecordingDisk) -> World:
    """The groups are noted down again and again, and old actions go."""
    world = World(disk)
    for _ in range(6):
        world.act(6)
        world.note_groups()
        world.act(9)
    world.sync_actions()
    return world


def snapshots_and_kills(disk: RecordingDisk) -> World:
    """Killed after a snapshot, and with actions behind it that were not synced."""
    world = World(disk)
    for count in (7, 12, 4):
        world.act(count)
        world.note_groups()
        world.act(count)
        disk.unlock()
        world = after_kill(world)
    world.act()
    return world


def retention_by_age(disk: RecordingDisk) -> World:
    """Segments go as soon as all that is in them is old enough, and not before."""
    world = World(disk, history=History(options=replace(RETAINING, retain_ms=9_000)))
    for round_ in range(22):
        world.clock.pass_ms(1_500 * (round_ % 3))
        _send_and_wait(world, 420)
        world.expire()
    assert world.store.first_offset > 0
    return world


def keepers(disk: RecordingDisk) -> World:
    """Retention waits for a keeper: before it comes, while it lags, over kills, and when it is no more."""
    world = _retaining(disk)
    kept_offset = 0
    for round_ in range(18):
        _send_and_wait(world, 400)
        if round_ == 2:
            world.keep(0)
        if round_ in (6, 9, 12):
            kept_offset += world.options.segment_bytes
            world.keep(kept_offset)
        if round_ in (4, 7, 8, 10, 14):
            world.give_up()
        if round_ in (5, 11):
            disk.unlock()
            world = after_kill(world)
    assert world.store.first_offset > 0
    world.end_keeper()
    assert world.give_up() > 0
    world.send(world.frame(orders=5))
    return world


def keepers_by_force(disk: RecordingDisk) -> World:
    """A keeper loses much of both logs in a life that asks nobody, and goes on in lives that wait for it."""
    world = _retaining(disk)
    world.keep(0)
    for is_forced in (False, True, False):
        disk.unlock()
        world = after_kill(world, is_forced=is_forced)
        for _ in range(4):
            _send_and_wait(world, 700)
            world.act(30)
            world.note_groups()
        assert (world.give_up() > 0) is is_forced
        assert (world.store.actions.first_offset > 0) is (world.store.first_offset > 0)
    world.keep(world.store.durable_offset, world.store.actions.log.durable_offset)
    assert world.give_up() > 0
    return world


def a_full_disk(disk: RecordingDisk) -> World:
    """There is no room, then there is a little, then there is enough."""
    world = World(disk)
    world.send(world.frame(orders=300))
    for room_bytes in (0, 200, 700, 1_300, 2_600):
        disk.capacity_bytes -= disk.free_bytes() - room_bytes
        refused = 0
        for length in (900, 30, 500, 700):
            try:
                world.send(world.frame(orders=length), world.frame(invoices=length // 2))
            except NoRoomError:
                refused += 1
        assert refused
        disk.capacity_bytes = UNLIMITED
        world.send(world.frame(orders=room_bytes // 4))
    return world


def failed_syncs(disk: RecordingDisk) -> World:
    """A sync fails, the process ends itself, the next one finds what the cache still shows."""
    world = World(disk)
    for path in ("commitlog/", "actionlog/", "commitlog/"):
        world.send(world.frame(orders=[200, 300]))
        world.act(2)
        world.append(world.frame(orders=[100, 150], invoices=40))
        disk.fails_sync = _once(path)
        try:
            world.sync()
            world.sync_actions()
        except PoisonedError:
            world.store.close()
            world = after_kill(world)
    world.send(world.frame(orders=10))
    return world


def _once(path: str) -> Callable[[str], bool]:
    left = [path]
    return lambda failing: bool(left) and failing.startswith(left[0]) and bool(left.pop())


def _retaining(disk: RecordingDisk) -> World:
    return World(disk, history=History(options=RETAINING))


def _send_and_wait(world: World, length: int) -> None:
    world.send(world.frame(orders=[length, 20], invoices=60))
    world.clock.pass_ms(1_100)
    world.store.step()


def after_kill(world: World, *, is_forced: bool = False) -> World:
    """What was written is in the page cache: the next life takes it as accepted."""
    world = next_life(world, world.disk, is_forced=is_forced)
    world.acknowledge()
    world.history.synced_actions.append((len(world.history.actions), len(world.disk.operations)))
    return world


def next_life(world: World, disk: RecordingDisk, *, is_forced: bool = False) -> World:
    clock = _later(world.clock)
    return World(disk, history=world.history, ids=world.ids, clock=clock, is_forced=is_forced)


def _later(clock: FakeClock) -> FakeClock:
    clock.pass_ms(5_000)
    return clock


SCENARIOS: tuple[Scenario, ...] = (
    first_start,
    lone_messages,
    group_commits,
    appends_before_a_sync,
    rolls,
    exact_fits,
    checkpoints_and_flushes,
    actions_among_messages,
    repeats,
    clean_stops,
    kills,
    retention,
    retention_beside_the_writer,
    retention_of_a_quiet_subject,
    kills_among_recycled_segments,
    snapshots,
    snapshots_and_kills,
    retention_by_age,
    keepers,
    keepers_by_force,
    a_full_disk,
    failed_syncs,
    restarts_without_messages,
)
