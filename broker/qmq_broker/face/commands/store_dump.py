"""The dump of a data directory: the content of its files, row by row, for people and for other tools.

Each kind of content has a generator of rows ready for JSON, which keeps one in memory at a time. A
dump takes no lock and changes nothing: while a broker runs, it shows what the files hold at that
moment. Damage is a row of its own, with the reason.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Final, TypeVar

import msgspec

from qmq_broker.errors import CorruptionError
from qmq_broker.face.routes.json_messages import JsonDelivered, record_to_json
from qmq_broker.service.delivery.snapshot import check_groups
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.format_file import Format, required_format
from qmq_broker.storage.files.journal import Chunk, JournalFile, journal_bases
from qmq_broker.storage.files.keepers import read_keepers
from qmq_broker.storage.files.retained import read_retained
from qmq_broker.storage.files.small_file import read_file, unseal
from qmq_broker.storage.files.snapshots import GroupsContent, read_snapshot
from qmq_broker.storage.ids.journal import IdChunk, decode_id_chunk
from qmq_broker.storage.logs.action_log import ACTION_KINDS
from qmq_broker.storage.logs.actions import decode_actions
from qmq_broker.storage.logs.frame_scan import ScannedFrame
from qmq_broker.storage.logs.kinds import COMMIT_KINDS, QUEUED_KINDS
from qmq_broker.storage.logs.log_recovery import torn_bytes_after
from qmq_broker.storage.logs.segments import Segments
from qmq_broker.storage.logs.summary import SegmentSummary
from qmq_broker.storage.queues.entry_chunk import EntryChunk, decode_entry_chunk
from qmq_broker.storage.queues.queue_files import ENTRY_BYTES, QueueFiles
from qmq_broker.storage.queues.queue_table import QueueTable
from qmq_broker.storage.schedule.columns import IN_SCHEDULE, Subjects
from qmq_broker.storage.schedule.files import ScheduleFiles
from qmq_broker.storage.upkeep.inspect_files import sealed_array, slots
from qmq_broker.storage.upkeep.inspect_log import DamagedRange, walk
from qmq_broker.storage.upkeep.verify_segment import check_flags, log_frame
from qmq_client.group.dead_letters import letters_of
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FRAME_HEADER_BYTES, FrameKind
from qmq_client.wire.frame_head import MESSAGE_KINDS
from qmq_client.wire.message_id import format_message_id
from qmq_client.wire.requests import sized_part

Row = dict[str, Any]
_ENTRY: Final = struct.Struct(">QIQ")
_ENTRIES_PER_READ: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpQuestion:
    """Which rows to show."""

    subject: str | None = None
    #: First offset in the log to show; for entries, the first sequence.
    first: int = 0


def dump(disk: Disk, kind: str, question: DumpQuestion) -> Iterator[Row]:
    """The rows of one kind of `KINDS`; raises `StoreError` if this is not a data directory."""
    yield from KINDS[kind](disk, required_format(disk), question)


def _format(disk: Disk, format_: Format, question: DumpQuestion) -> Iterator[Row]:
    yield {
        "store_id": format_.store_id.hex(),
        "segment_bytes": format_.segment_bytes,
        "action_segment_bytes": format_.action_segment_bytes,
        "queue_entries_per_file": format_.queue_entries_per_file,
    }


def _clean(disk: Disk, format_: Format, question: DumpQuestion) -> Iterator[Row]:
    data = read_file(disk, layout.CLEAN)
    if data is None:
        return
    content = unseal(data)
    if content is None:
        yield _damaged(layout.CLEAN, 0, len(data), "its checksum does not match")
    else:
        yield msgspec.json.decode(content)


def _checkpoint(disk: Disk, format_: Format, question: DumpQuestion) -> Iterator[Row]:
    for path, slot, reason in slots(disk, format_.store_id):
        if slot is None:
            yield _damaged(path, 0, None, reason)
        else:
            yield {"file": path} | msgspec.to_builtins(slot)


def _retained(disk: Disk, format_: Format, question: DumpQuestion) -> Iterator[Row]:
    try:
        retained = read_retained(disk, format_.store_id)
    except CorruptionError as error:
        yield _damaged(layout.RETAINED, 0, None, error.reason)
        return
    removed = {"removed": retained.removed} if retained.removed else {}
    firsts = retained.first_sequences
    yield {"first_offset": retained.first_offset, "first_sequences": firsts} | removed


def _keepers(disk: Disk, format_: Format, question: DumpQuestion) -> Iterator[Row]:
    try:
        keepers = read_keepers(disk, format_.store_id)
    except CorruptionError as error:
        yield _damaged(layout.KEEPERS, 0, None, error.reason)
        return
    yield from map(_named, keepers)


def _queues(disk: Disk, format_: Format, question: DumpQuestion) -> Iterator[Row]:
    table, reason = sealed_array(disk, layout.QUEUE_TABLE, QueueTable)
    if reason:
        yield _damaged(layout.QUEUE_TABLE, 0, None, reason)
    for state in table.queues if table else ():
        if question.subject in (None, state.subject):
            assert table is not None
            yield {"indexed_offset": table.indexed_offset} | _named(state)


def _summaries(disk: Disk, format_: Format, question: DumpQuestion) -> Iterator[Row]:
    for name in disk.names(layout.SUMMARIES):
        if layout.parse_number(name) is None:
            continue
        path = f"{layout.SUMMARIES}/{name}"
        found, reason = sealed_array(disk, path, SegmentSummary)
        if found is None:
            yield _damaged(path, 0, None, reason)
        elif question.subject is None or found.span(question.subject) is not None:
            yield {"file": path} | _named(found)


def _snapshot(disk: Disk, format_: Format, question: DumpQuestion) -> Iterator[Row]:
    for path in layout.SNAPSHOTS:
        slot, reason = read_snapshot(disk, path)
        if reason:
            yield _damaged(path, 0, None, reason)
        if slot is None or slot.content is None:
            continue
        content, snapshot = slot.content, slot.snapshot
        head = {"file": path, "generation": snapshot.generation, "offset": snapshot.offset}
        yield from (head | row for row in _groups(content, question))


def _groups(content: GroupsContent, question: DumpQuestion) -> Iterator[Row]:
    """A row for each group, followed by a row for each of its dead letters."""
    pages = iter(content.pages)
    for group in check_groups(content).groups:
        is_wanted = question.subject in (None, group.subject)
        if is_wanted:
            yield _named(group)
        for page in islice(pages, group.pages):
            for one in letters_of(page.read()) if is_wanted else ():
                yield {"subject": group.subject, "group": group.group, "dead": _named(one)}


def _segments(disk: Disk, format_: Format, question: DumpQuestion) -> Iterator[Row]:
    for log, segment_bytes in _logs(format_).items():
        segments = Segments(disk, log, segment_bytes)
        try:
            for base in segments.bases:
                yield {
                    "file": layout.segment_path(log, base),
                    "first_offset": base,
                    "file_bytes": segments.file(base).length(),
                    "made_at_ms": segments.made_at_ms(base),
                    "is_recycled": segments.is_recycled(base),
                }
            for number in segments.spares:
                yield {"file": layout.spare_path(log, number), "is_spare": True}
        finally:
            segments.close()


def _frames(disk: Disk, format_: Format, question: DumpQuestion) -> Iterator[Row]:
    for frame in _walk(disk, format_, layout.COMMIT_LOG, question.first):
        if isinstance(frame, dict):
            yield frame
            continue
        header = frame.header
        row: Row = {
            "offset": frame.offset,
            "kind": header.kind.name,
            "frame_bytes": header.frame_bytes,
            "records": header.record_count,
            "stored_at_ms": header.stored_at_ms,
            "epoch": header.epoch,
            "durable_gap_bytes": header.durable_gap,
        }
        if header.kind in MESSAGE_KINDS:
            try:
                runs = log_frame(frame).runs
            except ProtocolError as error:
                yield row | {"damaged": str(error)}
                continue
            if question.subject and question.subject not in [run.subject for run in runs]:
                continue
            row["runs"] = [[run.subject, run.first_sequence, run.count] for run in runs]
        elif question.subject:
            continue
        yield row


def _records(disk: Disk, format_: Format, question: DumpQuestion) -> Iterator[Row]:
    for frame in _walk(disk, format_, layout.COMMIT_LOG, question.first):
        if isinstance(frame, dict):
            yield frame
        elif frame.header.kind in QUEUED_KINDS:
            yield from _records_of(frame, question.subject)


def _records_of(frame: ScannedFrame, subject: str | None) -> Iterator[Row]:
    try:
        messages = log_frame(frame)
    except ProtocolError as error:
        yield _damaged(layout.COMMIT_LOG, frame.offset, None, str(error))
        return
    index = 0
    for run in messages.runs:
        for sequence in range(run.first_sequence, run.first_sequence + run.count):
            if subject in (None, run.subject):
                data = messages.record(index)
                check_flags(data)
                yield {
                    "offset": frame.offset + messages.positions[index],
                    "record_bytes": len(data),
                    "stored_at_ms": frame.header.stored_at_ms,
                    "subject": run.subject,
                } | _fields_of(record_to_json(run.subject, data, sequence))
            index += 1


def _fields_of(message: JsonDelivered) -> Row:
    """The fields that are set. A JSON body is decoded: its text as sent may have several lines."""
    fields: Row = msgspec.json.decode(msgspec.json.encode(message))
    return fields


def _actions(disk: Disk, format_: Format, question: DumpQuestion) -> Iterator[Row]:
    for frame in _walk(disk, format_, layout.ACTION_LOG, question.first):
        if isinstance(frame, dict):
            yield frame
        elif frame.header.kind is FrameKind.ACTIONS:
            try:
                actions = decode_actions(sized_part(frame.data, FRAME_HEADER_BYTES))
            except ProtocolError as error:
                yield _damaged(layout.ACTION_LOG, frame.offset, None, str(error))
                continue
            for action in actions:
                if question.subject in (None, action.subject):
                    head = {"offset": frame.offset, "action": type(action).__name__}
                    yield head | _named(action)


def _entries(disk: Disk, format_: Format, question: DumpQuestion) -> Iterator[Row]:
    """The entries of one subject, or of all in the queue table, as their files hold them."""
    files = QueueFiles(disk, entries_per_file=format_.queue_entries_per_file, open_files=4)
    table, _ = sealed_array(disk, layout.QUEUE_TABLE, QueueTable)
    firsts = read_retained(disk, format_.store_id).first_sequences
    try:
        for state in table.queues if table else ():
            if question.subject not in (None, state.subject):
                continue
            first = max(question.first, firsts.get(state.subject, 0))
            for sequence in range(first, state.next_sequence, _ENTRIES_PER_READ):
                after = min(sequence + _ENTRIES_PER_READ, state.next_sequence)
                try:
                    packed = files.read(state.subject, sequence, after)
                except CorruptionError as error:
                    yield _damaged(error.segment, error.offset, None, error.reason)
                    continue
                assert len(packed) == (after - sequence) * ENTRY_BYTES
                for number, entry in zip(count(sequence), _ENTRY.iter_unpack(packed), strict=False):
                    yield {
                        "subject": state.subject,
                        "sequence": number,
                        "offset": entry[0],
                        "record_bytes": entry[1],
                        "tag_hash": entry[2],
                    }
    finally:
        files.close()


def _walk(disk: Disk, format_: Format, log: str, offset: int) -> Iterator[ScannedFrame | Row]:
    """The frames of a log; a range without frames is yielded as a row."""
    segments = Segments(disk, log, _logs(format_)[log])
    kinds = COMMIT_KINDS if log == layout.COMMIT_LOG else ACTION_KINDS
    try:
        for found in walk(segments, kinds, store_id=format_.store_id, offset=offset):
            if isinstance(found, ScannedFrame):
                yield found
            else:
                yield _no_frame(disk, segments, found, format_.store_id)
    finally:
        segments.close()


def _logs(format_: Format) -> dict[str, int]:
    return {
        layout.COMMIT_LOG: format_.segment_bytes,
        layout.ACTION_LOG: format_.action_segment_bytes,
    }


def _no_frame(disk: Disk, segments: Segments, found: DamagedRange, store_id: bytes) -> Row:
    """A range without frames: unused space after the end of the log, or damage."""
    first, next_, path = found.first_offset, found.next_offset, segments.path(found.first_offset)
    is_last = next_ >= segments.bases[-1] + segments.segment_bytes
    if (
        is_last
        and first >= _synced(disk, segments.directory, store_id)
        and not torn_bytes_after(segments, first)
    ):
        is_recycled = segments.is_recycled(segments.base_of(first))
        what = "old frames of a recycled segment" if is_recycled else "preallocated space"
        return {"file": path, "first": first, "next": next_, "unused": what}
    return _damaged(path, first, next_, found.reason)


def _synced(disk: Disk, log: str, store_id: bytes) -> int:
    """How far a log was synced, according to the newest checkpoint."""
    whole = [slot for _, slot, _ in slots(disk, store_id) if slot is not None]
    newest = max(whole, key=lambda slot: slot.generation, default=None)
    if newest is None:
        return 0
    point = newest.commit_log if log == layout.COMMIT_LOG else newest.action_log
    return point.durable_offset


def _damaged(path: str, first: int, next_: int | None, reason: str) -> Row:
    """The row of a file, or of a range in it, that cannot be read."""
    return {"file": path, "first": first, "next": next_, "unreadable": reason}


def _named(value: msgspec.Struct) -> Row:
    """An array-like struct with the names of its fields."""
    return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _named(value)
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value.hex() if isinstance(value, bytes) else value


#: The kinds of rows, each with its generator.
KINDS: Final[Mapping[str, Callable[[Disk, Format, DumpQuestion], Iterator[Row]]]] = {
    "actions": _actions,
    "checkpoint": _checkpoint,
    "clean": _clean,
    "dispatch": lambda disk, format_, _: dispatch_rows(disk, format_),
    "entries": _entries,
    "format": _format,
    "frames": _frames,
    "ids": lambda disk, format_, _: id_rows(disk, format_),
    "keepers": _keepers,
    "queues": _queues,
    "records": _records,
    "retained": _retained,
    "schedule": lambda disk, format_, asked: schedule_rows(disk, format_, asked.subject),
    "segments": _segments,
    "snapshot": _snapshot,
    "summaries": _summaries,
    "waiting": lambda disk, format_, asked: waiting_rows(disk, format_, asked.subject),
}


T = TypeVar("T")
_NO_SENSE: Final = "a chunk whose content cannot be decoded"


def id_rows(disk: Disk, format_: Format) -> Iterator[Row]:
    """A row for each run of consecutive message ids in one frame."""

    def rows(file: str, _: Chunk, found: IdChunk) -> Iterator[Row]:
        for subject, columns in found.columns.items():
            for instance, first, last, offset in zip(*columns, strict=True):
                yield {
                    "file": file,
                    "generation": found.era.first_offset,
                    "subject": subject,
                    "first_id": f"{instance:016x}{first:016x}",
                    "count": last - first + 1,
                    "offset": offset,
                }

    return _rows(disk, format_, layout.IDS, decode_id_chunk, rows)


def waiting_rows(disk: Disk, format_: Format, subject: str | None) -> Iterator[Row]:
    """A row for each run of entries of one consume queue in one chunk."""

    def rows(file: str, chunk: Chunk, found: EntryChunk) -> Iterator[Row]:
        for run in found.runs:
            if subject in (None, run.subject):
                yield {
                    "file": file,
                    "first": chunk.first_offset,
                    "next": chunk.next_offset,
                    "subject": run.subject,
                    "first_sequence": run.first_sequence,
                    "count": len(run.entries) // ENTRY_BYTES,
                }

    return _rows(disk, format_, layout.ENTRIES, decode_entry_chunk, rows)


def _rows(
    disk: Disk,
    format_: Format,
    directory: str,
    decode: Callable[[bytes], T | None],
    rows: Callable[[str, Chunk, T], Iterator[Row]],
) -> Iterator[Row]:
    """Rows of every chunk of every file, and one for each place that cannot be read."""
    for base in journal_bases(disk, directory):
        file = JournalFile(disk, directory, base, format_.store_id)
        for chunk in file.chunks():
            found = decode(chunk.content)
            if found is None:
                yield {"file": file.path, "first": chunk.first_offset, "unreadable": _NO_SENSE}
            else:
                yield from rows(file.path, chunk, found)
        if reason := _unread(file):
            yield {"file": file.path, "unreadable": reason}


def _unread(file: JournalFile) -> str:
    """What is wrong after the last chunk of a file; empty if nothing is."""
    if not file.is_journal:
        return "not the head of a journal of this store"
    if file.rest_bytes:
        return f"{file.rest_bytes} bytes from position {file.position} are not a complete chunk"
    return ""


def schedule_rows(disk: Disk, format_: Format, subject: str | None) -> Iterator[Row]:
    """A row for each message of each schedule log, up to the first frame that is not whole."""
    files, subjects = ScheduleFiles(disk, format_.store_id), Subjects()
    try:
        for bucket in files.buckets(layout.SCHEDULE):
            path = layout.bucket_path(layout.SCHEDULE, bucket)
            try:
                next_position = files.good_bytes(layout.SCHEDULE, bucket)
                for columns in files.columns(bucket, subjects, next_position=next_position):
                    for index in range(len(columns)):
                        message = columns.message(index, subjects)
                        if subject in (None, message.subject):
                            yield {
                                "file": path,
                                "sequence": message.sequence,
                                "source": message.source,
                                "due_at_ms": message.due_at_ms,
                                "subject": message.subject,
                                "message_id": format_message_id(message.message_id),
                                "position": message.place & ~IN_SCHEDULE,
                                "record_bytes": message.record_bytes,
                            }
            except CorruptionError as error:
                yield {"file": path, "offset": error.offset, "damaged": error.reason}
    finally:
        files.close()


def dispatch_rows(disk: Disk, format_: Format) -> Iterator[Row]:
    """A row for each entry of each dispatch log."""
    files = ScheduleFiles(disk, format_.store_id)
    try:
        for bucket in files.buckets(layout.DISPATCH):
            path = layout.bucket_path(layout.DISPATCH, bucket)
            try:
                next_position = files.good_bytes(layout.DISPATCH, bucket)
                for state, sequence in files.states(bucket, next_position=next_position):
                    yield {"file": path, "sequence": sequence, "state": state.name.lower()}
            except CorruptionError as error:
                yield {"file": path, "offset": error.offset, "damaged": error.reason}
    finally:
        files.close()
