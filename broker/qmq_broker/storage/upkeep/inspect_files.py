"""Reads the small files of a data directory, with their content and faults.

Each file is read like at a start. The level of a fault is `damaged` if a start would refuse the
file, `ignored` if it would ignore it, and `rebuilt` if it would rebuild it. Changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from qmq_broker.errors import CorruptionError, UnknownFormatError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.checkpoint import (
    Checkpoint,
    read_slot,
    read_witness,
)
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.faults import Fault, damaged, ignored, rebuilt
from qmq_broker.storage.files.format_file import Format
from qmq_broker.storage.files.keepers import read_keepers
from qmq_broker.storage.files.retained import Retained, read_retained
from qmq_broker.storage.files.small_file import decode_whole, read_file, unseal
from qmq_broker.storage.files.snapshots import CheckGroups, Snapshot, read_snapshot
from qmq_broker.storage.logs.segments import SEGMENT_HEAD_BYTES, store_of_head
from qmq_broker.storage.queues.queue_files import QueueFiles
from qmq_broker.storage.queues.queue_table import QueueTable
from qmq_broker.storage.recovery import CleanStop
from qmq_broker.storage.schedule.bucket import read_table

T = TypeVar("T")

KNOWN_NAMES: Final = frozenset(
    {
        layout.LOCK,
        layout.FORMAT,
        layout.CLEAN,
        *layout.CHECKPOINTS,
        layout.COMMIT_LOG,
        layout.ACTION_LOG,
        layout.CONSUME_QUEUES,
        layout.STATE,
        layout.INDEX,
        layout.SUMMARIES,
        layout.IDS,
        layout.ENTRIES,
        layout.SCHEDULE,
        layout.DISPATCH,
        layout.SORTED,
        layout.LETTERS,
        layout.QUARANTINE,
    }
)
_STATE_FILES: Final = frozenset(
    {
        *layout.QUEUE_TABLES,
        layout.INDEX_TABLE,
        layout.SCHEDULE_TABLE,
        layout.RETAINED,
        layout.KEEPERS,
        layout.ACTIONS_WITNESS,
        *layout.SNAPSHOTS,
    }
)
_SEAL: Final = "its checksum does not match"


@dataclass(slots=True, kw_only=True)
class SmallFiles:
    """The small files as a start would read them."""

    retained: Retained
    checkpoint: Checkpoint | None = None
    #: Offset up to which the action log was synced, according to its witness.
    witnessed_offset: int = 0
    is_clean: bool = False
    #: The newest valid table of the consume queues.
    table: QueueTable | None = None
    #: Subjects whose queue files do not match that table …
    unfit_queues: list[str] = field(default_factory=list)
    #: … and the table from which a start continues; None if it rebuilds all queues.
    believed_table: QueueTable | None = None
    is_table_missing: bool = False
    #: The previous table, if it is valid.
    table_before: QueueTable | None = None
    #: Offset up to which the log was synced before delayed messages were copied, according to the schedule's table.
    copied_offset: int = 0
    has_schedule_table: bool = False
    snapshots: list[Snapshot] = field(default_factory=list)
    #: Offset of the action log from which a keeper lacks it; None without keepers.
    kept_actions_offset: int | None = None
    faults: list[Fault] = field(default_factory=list)

    @property
    def action_first_offset(self) -> int:
        """The offset from which the newest valid snapshot needs the action log."""
        return max((snapshot.offset for snapshot in self.snapshots), default=0)


def inspect_files(disk: Disk, format_: Format, check_groups: CheckGroups) -> SmallFiles:
    """Read everything except the logs and the consume queues."""
    files = SmallFiles(retained=Retained(format_.store_id, 0, {}))
    _format(disk, format_, files)
    _names(disk, files)
    _checkpoints(disk, format_, files)
    _clean(disk, files)
    _retained(disk, format_, files)
    _keepers(disk, format_, files)
    _table(disk, format_, files)
    schedule = read_table(disk, format_.store_id)
    files.copied_offset = schedule.copied_offset if schedule else 0
    files.has_schedule_table = schedule is not None
    for path in layout.SNAPSHOTS:
        _snapshot(disk, path, format_, files, check_groups)
    return files


def slots(disk: Disk, store_id: bytes) -> list[tuple[str, Checkpoint | None, str]]:
    """Both checkpoint slots, each with the reason if it is invalid: damaged, or of another store."""
    there = set(disk.names(layout.ROOT))
    found: list[tuple[str, Checkpoint | None, str]] = []
    for path in layout.CHECKPOINTS:
        if path in there:
            file = disk.open(path)
            try:
                found.append((path, *read_slot(file, store_id)))
            finally:
                file.close()
    return found


def sealed_array(disk: Disk, path: str, kind: type[T]) -> tuple[T | None, str]:
    """A derived small MessagePack file, or the reason why it is damaged; (None, "") if there is none."""
    data = read_file(disk, path)
    if data is None:
        return None, ""
    content = unseal(data)
    if content is None:
        return None, _SEAL
    try:
        return decode_whole(path, content, kind), ""
    except UnknownFormatError as error:
        return None, error.found


def _format(disk: Disk, format_: Format, files: SmallFiles) -> None:
    """Check FORMAT. If all segments of both logs name the same other store, FORMAT itself is the foreign file."""
    stores = set()
    for log in (layout.COMMIT_LOG, layout.ACTION_LOG):
        for name in disk.names(log):
            base = layout.parse_number(name)
            if base is not None:
                file = disk.open(f"{log}/{name}")
                try:
                    stores.add(store_of_head(file.read(0, SEGMENT_HEAD_BYTES), base))
                finally:
                    file.close()
    named = [store_id for store_id in stores if store_id is not None]
    if len(named) == 1 and named[0] != format_.store_id:
        what = f"of store {format_.store_id.hex()}, but the segments here are of store {named[0].hex()}"
        files.faults.append(damaged(layout.FORMAT, what))


def _names(disk: Disk, files: SmallFiles) -> None:
    for name in disk.names(layout.ROOT):
        if name.removesuffix(layout.DRAFT_SUFFIX) not in KNOWN_NAMES:
            files.faults.append(ignored(name, "unknown file", "It is not read."))
    for name in disk.names(layout.STATE):
        path = f"{layout.STATE}/{name}"
        if path.removesuffix(layout.DRAFT_SUFFIX) not in _STATE_FILES:
            files.faults.append(ignored(path, "unknown file", "It is not read."))


def _checkpoints(disk: Disk, format_: Format, files: SmallFiles) -> None:
    found = slots(disk, format_.store_id)
    whole = [slot for _, slot, _ in found if slot is not None]
    files.checkpoint = max(whole, key=lambda slot: slot.generation, default=None)
    files.witnessed_offset, why_not = read_witness(disk, format_.store_id)
    if why_not:
        what = "Until the next start, an older action log that is copied in is not detected."
        files.faults.append(ignored(layout.ACTIONS_WITNESS, why_not, what))
    meaning = (
        "The other slot is used."
        if whole
        else "The next start reads the logs from their beginning, and damage after the last sync that frames confirm looks like a torn tail."
    )
    for path, slot, reason in found:
        # A new directory has both files but has written only one.
        if slot is None and not (whole and max(s.generation for s in whole) == 1):
            files.faults.append(ignored(path, reason, meaning))
    if not found and disk.names(layout.COMMIT_LOG):
        files.faults.append(ignored(layout.CHECKPOINTS[0], "missing, like the other slot", meaning))


def _clean(disk: Disk, files: SmallFiles) -> None:
    data = read_file(disk, layout.CLEAN)
    if data is None:
        return
    content = unseal(data)
    try:
        if content is None:
            raise msgspec.DecodeError(_SEAL)
        stop = msgspec.json.decode(content, type=CleanStop)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        files.faults.append(ignored(layout.CLEAN, str(error), "The last stop counts as a crash."))
        return
    last = files.checkpoint
    files.is_clean = last is not None and (stop.generation, stop.epoch) == (
        last.generation,
        last.epoch,
    )
    if not files.is_clean:
        what = f"names checkpoint {stop.generation}, which is not the newest"
        files.faults.append(ignored(layout.CLEAN, what, "The last stop counts as a crash."))


def _retained(disk: Disk, format_: Format, files: SmallFiles) -> None:
    try:
        files.retained = read_retained(disk, format_.store_id)
    except CorruptionError as error:
        files.faults.append(damaged(layout.RETAINED, error.reason))
        return
    if files.retained.first_offset % format_.segment_bytes:
        what = f"first offset {files.retained.first_offset} is not the beginning of a segment"
        files.faults.append(damaged(layout.RETAINED, what))


def _keepers(disk: Disk, format_: Format, files: SmallFiles) -> None:
    try:
        keepers = read_keepers(disk, format_.store_id)
    except CorruptionError as error:
        files.faults.append(damaged(layout.KEEPERS, error.reason))
        return
    offsets = [keeper.kept_actions_offset for keeper in keepers]
    files.kept_actions_offset = min(offsets, default=None)


def _table(disk: Disk, format_: Format, files: SmallFiles) -> None:
    newest, before = layout.QUEUE_TABLES
    table, reason = _table_at(disk, newest, format_)
    files.table_before, reason_before = _table_at(disk, before, format_)
    if reason_before:
        meaning = "A start needs it if a power cut removed a part of the queues' files."
        files.faults.append(ignored(before, reason_before, meaning))
    if reason:
        files.faults.append(rebuilt(layout.QUEUE_TABLE, reason))
    files.is_table_missing = table is None and not reason
    files.table = files.believed_table = table or files.table_before
    if files.table is None:
        return
    there = QueueFiles(disk, entries_per_file=format_.queue_entries_per_file, open_files=4)
    files.unfit_queues = list(there.unfit(files.table, files.retained))
    if files.unfit_queues:
        older = files.table_before
        is_fit = older is not None and next(there.unfit(older, files.retained), None) is None
        files.believed_table = older if is_fit else None
    there.close()


def _table_at(disk: Disk, path: str, format_: Format) -> tuple[QueueTable | None, str]:
    """The table in a file of this store; None, with a reason if it exists but is damaged."""
    table, reason = sealed_array(disk, path, QueueTable)
    if table is not None and table.store_id != format_.store_id:
        return None, f"of store {table.store_id.hex()}"
    return table, reason


def _snapshot(
    disk: Disk, path: str, format_: Format, files: SmallFiles, check_groups: CheckGroups
) -> None:
    slot, reason = read_snapshot(disk, path)
    if slot is not None and slot.snapshot.store_id != format_.store_id:
        reason = f"of store {slot.snapshot.store_id.hex()}"
        slot = None
    if slot is not None:
        try:
            if slot.content is not None:
                check_groups(slot.content)
        except CorruptionError as error:
            files.faults.append(damaged(path, f"its checksum matches, but: {error.reason}"))
        files.snapshots.append(slot.snapshot)
    elif reason:
        meaning = "The other snapshot, or the whole action log if that is damaged too, gives the same groups."
        files.faults.append(ignored(path, reason, meaning))
