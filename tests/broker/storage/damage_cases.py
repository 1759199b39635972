"""Every kind of file under every kind of damage, and what must come of it: the table of test_verify."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qmq_broker.service.delivery.snapshot import encode_groups
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.faults import Level
from qmq_broker.storage.files.small_file import unseal
from qmq_client.wire.checksum import crc32c
from tests.broker.storage.damaged import Directory, flip
from tests.crash.recording_disk import RecordingDisk
from tests.crash.world import OPTIONS

SEGMENT = OPTIONS.segment_bytes
FIRST = layout.segment_path(layout.COMMIT_LOG, 0)
SECOND = layout.segment_path(layout.COMMIT_LOG, SEGMENT)
THIRD = layout.segment_path(layout.COMMIT_LOG, 2 * SEGMENT)
ACTIONS = layout.segment_path(layout.ACTION_LOG, 0)
QUEUE = layout.queue_path("orders", 0)
ID_FILE = layout.segment_path(layout.IDS, 0)
EMPTY_GROUPS = encode_groups([], 0)


def directory_with_groups() -> Directory:
    """Clean, with both snapshots."""
    directory = Directory(is_clean=False)
    actions = directory.world.store.actions
    for _ in range(2):
        actions.write_snapshot(actions.log.written_offset, EMPTY_GROUPS)
        directory.world.act(3)
    directory.world.store.close()
    directory.image = directory.world.disk.image
    return directory


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row."""

    harm: Callable[[Directory], None]
    level: Level | None
    #: File that the worst fault names.
    file: str = ""
    start: str = "serves"


def swap(directory: Directory, one: str, other: str) -> None:
    content = directory.content(one)
    directory.put(one, directory.content(other))
    directory.put(other, content)


def add(path: str, content: bytes = b"stray") -> Callable[[Directory], None]:
    def harm(directory: Directory) -> None:
        disk = RecordingDisk(directory.image)
        file = disk.open(path, is_new=True)
        file.write(0, [content])
        directory.image = disk.image

    return harm


def sealed_again(path: str, change: Callable[[bytes], bytes]) -> Callable[[Directory], None]:
    """Alter the content of a small file and make its checksum fit."""

    def harm(directory: Directory) -> None:
        content = unseal(directory.content(path))
        assert content is not None
        altered = change(content)
        directory.put(path, altered + b"\ncrc32c %08x\n" % crc32c(altered))

    return harm


def with_the_journal(harm: Callable[[Directory], None]) -> Callable[[Directory], None]:
    """The harm, and no journal of entries that would make up for it."""

    def harm_both(directory: Directory) -> None:
        harm(directory)
        directory.remove(layout.ENTRIES)

    return harm_both


def of_another_store(path: str) -> Callable[[Directory], None]:
    return lambda d: d.put(path, directory_with_groups().content(path))


def remove_all(directory: Directory, paths: Sequence[str]) -> None:
    for path in paths:
        directory.remove(path)


def flip_both_snapshots(directory: Directory) -> None:
    for path in layout.SNAPSHOTS:
        directory.change(path, flip(5))


def flip_where_a_start_reads(directory: Directory) -> None:
    directory.change(FIRST, flip(700))
    directory.remove(layout.IDS)


#: Where a start does not read: it serves, and refuses each pull that meets the damage.
REFUSES = "refuses pulls"
DAMAGED, REBUILT, IGNORED = Level.DAMAGED, Level.REBUILT, Level.IGNORED
CASES: dict[str, Case] = {
    "nothing": Case(harm=lambda d: None, level=None),
    # FORMAT
    "FORMAT flipped": Case(
        harm=lambda d: d.change(layout.FORMAT, flip(12)),
        level=DAMAGED,
        file=layout.FORMAT,
        start="halts",
    ),
    "FORMAT cut": Case(
        harm=lambda d: d.change(layout.FORMAT, lambda c: c[:40]),
        level=DAMAGED,
        file=layout.FORMAT,
        start="halts",
    ),
    "FORMAT missing": Case(
        harm=lambda d: d.remove(layout.FORMAT), level=DAMAGED, file=layout.FORMAT, start="halts"
    ),
    "FORMAT of another store": Case(
        harm=of_another_store(layout.FORMAT), level=DAMAGED, file=layout.FORMAT, start="halts"
    ),
    # CLEAN
    "CLEAN flipped": Case(
        harm=lambda d: d.change(layout.CLEAN, flip(3)), level=IGNORED, file=layout.CLEAN
    ),
    "CLEAN of another life": Case(
        harm=sealed_again(layout.CLEAN, lambda c: c.replace(b'epoch":', b'epoch":9')),
        level=IGNORED,
        file=layout.CLEAN,
    ),
    "CLEAN missing": Case(harm=lambda d: d.remove(layout.CLEAN), level=None),
    # checkpoints
    "one slot flipped": Case(
        harm=lambda d: d.change("checkpoint.0", flip(30)), level=IGNORED, file="checkpoint.0"
    ),
    "one slot cut": Case(
        harm=lambda d: d.change("checkpoint.1", lambda c: c[:512]),
        level=IGNORED,
        file="checkpoint.1",
    ),
    "both slots missing": Case(
        harm=lambda d: remove_all(d, layout.CHECKPOINTS),
        level=IGNORED,
        file="checkpoint.0",
    ),
    "the witness of the actions flipped": Case(
        harm=lambda d: d.change(layout.ACTIONS_WITNESS, flip(30)),
        level=IGNORED,
        file=layout.ACTIONS_WITNESS,
    ),
    # commit log
    "a header flipped": Case(
        harm=lambda d: d.change(FIRST, flip(88 + 9)), level=DAMAGED, file=FIRST
    ),
    "a body flipped": Case(
        harm=lambda d: d.change(FIRST, flip(700)), level=DAMAGED, file=FIRST, start=REFUSES
    ),
    "a body flipped where a start reads": Case(
        harm=flip_where_a_start_reads, level=DAMAGED, file=FIRST, start="halts"
    ),
    "the last frame flipped": Case(
        harm=lambda d: d.change(THIRD, flip(d.next_offset % SEGMENT - 20)),
        level=DAMAGED,
        file=THIRD,
        start="halts",
    ),
    "a segment head flipped": Case(
        harm=lambda d: d.change(SECOND, flip(60)), level=DAMAGED, file=SECOND, start="halts"
    ),
    "a page of zeros": Case(
        harm=lambda d: d.change(SECOND, lambda c: c[:512] + bytes(512) + c[1024:]),
        level=DAMAGED,
        file=SECOND,
        start=REFUSES,
    ),
    "a sealed segment cut": Case(
        harm=lambda d: d.change(FIRST, lambda c: c[:1000]), level=DAMAGED, file=FIRST, start=REFUSES
    ),
    "a segment empty": Case(
        harm=lambda d: d.put(SECOND, b""), level=DAMAGED, file=SECOND, start="halts"
    ),
    "the last segment cut below its end": Case(
        harm=lambda d: d.change(THIRD, lambda c: c[:300]), level=DAMAGED, file=THIRD, start="halts"
    ),
    "segments swapped": Case(
        harm=lambda d: swap(d, FIRST, SECOND), level=DAMAGED, file=FIRST, start="halts"
    ),
    "a segment missing": Case(
        harm=lambda d: d.remove(SECOND), level=DAMAGED, file=SECOND, start="halts"
    ),
    "all segments missing": Case(
        harm=lambda d: d.remove(layout.COMMIT_LOG), level=DAMAGED, file=FIRST, start="halts"
    ),
    "a segment of another store": Case(
        harm=of_another_store(SECOND), level=DAMAGED, file=SECOND, start="halts"
    ),
    "a segment longer": Case(
        harm=lambda d: d.change(FIRST, lambda c: c + b"more"), level=IGNORED, file=FIRST
    ),
    "a torn tail": Case(
        harm=lambda d: d.change(
            THIRD,
            lambda c: c[: d.next_offset % SEGMENT] + b"QMQF torn".ljust(40, b"x") + bytes(100),
        ),
        level=None,
    ),
    "strays among the segments": Case(
        harm=add("commitlog/00000000000000000777"),
        level=IGNORED,
        file="commitlog/00000000000000000777",
    ),
    "an editor's copy": Case(
        harm=add("commitlog/00000000000000000000~"),
        level=IGNORED,
        file="commitlog/00000000000000000000~",
    ),
    "a file of somebody else": Case(harm=add("notes.txt"), level=IGNORED, file="notes.txt"),
    # consume queues
    "an entry flipped": Case(
        harm=with_the_journal(lambda d: d.change(QUEUE, flip(25))),
        level=REBUILT,
        file=QUEUE,
        start="rebuilds",
    ),
    "a queue file cut": Case(
        harm=with_the_journal(lambda d: d.change(QUEUE, lambda c: c[:50])),
        level=REBUILT,
        file=QUEUE,
        start="rebuilds",
    ),
    "a queue file missing": Case(
        harm=with_the_journal(lambda d: d.remove(QUEUE)),
        level=REBUILT,
        file=QUEUE,
        start="rebuilds",
    ),
    "two queue files swapped": Case(
        harm=with_the_journal(lambda d: swap(d, QUEUE, layout.queue_path("orders", 80))),
        level=REBUILT,
        file=QUEUE,
        start="rebuilds",
    ),
    "all queues missing but not their journal": Case(
        harm=lambda d: d.remove(layout.CONSUME_QUEUES), level=REBUILT
    ),
    "all queues missing": Case(
        harm=with_the_journal(lambda d: d.remove(layout.CONSUME_QUEUES)),
        level=REBUILT,
        start="rebuilds",
    ),
    "the table flipped": Case(
        harm=with_the_journal(lambda d: d.change(layout.QUEUE_TABLE, flip(20))),
        level=REBUILT,
        file=layout.QUEUE_TABLE,
        start="rebuilds",
    ),
    "the table missing": Case(
        harm=with_the_journal(lambda d: d.remove(layout.QUEUE_TABLE)),
        level=REBUILT,
        file=layout.QUEUE_TABLE,
        start="rebuilds",
    ),
    "the table of another store": Case(
        harm=with_the_journal(of_another_store(layout.QUEUE_TABLE)),
        level=REBUILT,
        file=layout.QUEUE_TABLE,
        start="rebuilds",
    ),
    "the table before flipped": Case(
        harm=lambda d: add(layout.QUEUE_TABLES[1], d.content(layout.QUEUE_TABLE)[:-30])(d),
        level=IGNORED,
        file=layout.QUEUE_TABLES[1],
    ),
    # journals
    "an id flipped": Case(harm=lambda d: d.change(ID_FILE, flip(90)), level=REBUILT, file=ID_FILE),
    "ids cut": Case(
        harm=lambda d: d.change(ID_FILE, lambda c: c[:70]), level=REBUILT, file=ID_FILE
    ),
    "ids empty": Case(harm=lambda d: d.put(ID_FILE, b""), level=REBUILT, file=ID_FILE),
    "ids missing": Case(harm=lambda d: d.remove(layout.IDS), level=None),
    "ids of another store": Case(harm=of_another_store(ID_FILE), level=REBUILT, file=ID_FILE),
    "ids under another name": Case(
        harm=lambda d: add(f"ids/{SEGMENT:020d}", d.content(ID_FILE))(d),
        level=IGNORED,
        file=f"ids/{SEGMENT:020d}",
    ),
    "the folder of no subject": Case(
        harm=add("consumequeue/%41"), level=IGNORED, file="consumequeue/%41"
    ),
    # action log and snapshots
    "an action flipped": Case(
        harm=lambda d: d.change(
            sorted(path for path in d.files() if path.startswith("actionlog/"))[-1], flip(150)
        ),
        level=DAMAGED,
        start="halts",
    ),
    "the action log missing": Case(
        harm=lambda d: d.remove(layout.ACTION_LOG), level=DAMAGED, start="halts"
    ),
    "one snapshot flipped": Case(
        harm=lambda d: d.change("state/groups.1", flip(5)), level=IGNORED, file="state/groups.1"
    ),
    "one snapshot missing": Case(harm=lambda d: d.remove("state/groups.1"), level=None),
    "both snapshots flipped": Case(
        harm=flip_both_snapshots,
        level=DAMAGED,
        file=ACTIONS,
        start="halts",
    ),
    # where the log begins
    "retained is nonsense": Case(
        harm=add(layout.RETAINED), level=DAMAGED, file=layout.RETAINED, start="halts"
    ),
    # whom retention waits for
    "keepers is nonsense": Case(
        harm=add(layout.KEEPERS), level=DAMAGED, file=layout.KEEPERS, start="halts"
    ),
}
