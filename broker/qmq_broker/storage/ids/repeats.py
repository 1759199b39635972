"""Recognizes repeats: a message id is stored once within the dedupe window.

A repeat with the same content is answered with its first place and not stored again; with other content
the whole frame is refused. The same id under another subject is another message. A frame that mixes new messages and
repeats is rebuilt without the repeats. Earlier frames of the same append count as stored. A message
that was withdrawn before it arrived counts as a repeat, with any content.

The common case, a frame without repeats, costs one look-up per run of its ids.
"""

from __future__ import annotations

import logging
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.ids.runs import IdRun, SubjectIds, subject_ids
from qmq_broker.storage.ids.window import DedupeWindow, Known, RunTable
from qmq_broker.storage.logs.kinds import LOG_LIMITS
from qmq_client.wire.frame import FrameKind, MessageFrame, build_message_frame, parse_message_frame
from qmq_client.wire.message_id import split_message_id
from qmq_client.wire.record import (
    DELAYED_FLAG,
    EXPIRES_FLAG,
    FLAGS_POSITION,
    RECORD_FIXED_BYTES,
    record_message_id,
)
from qmq_client.wire.requests import SubjectPlace

_log = logging.getLogger(__name__)
_TIME: Final = struct.Struct(">Q")
#: Lengths of key, tags and headers, after the flags.
_LENGTHS: Final = struct.Struct(">BHH")
_BORN_POSITION: Final = RECORD_FIXED_BYTES - _TIME.size
#: The bytes between the checksum and the first time.
_HEAD: Final = slice(4, _BORN_POSITION)


class StoredFrame(msgspec.Struct, kw_only=True, eq=False):
    """A frame in the log, or one that will be appended, whose offset and time are still unknown."""

    frame: MessageFrame
    ids: SubjectIds
    first_sequences: tuple[int, ...] = ()
    physical_offset: int = 0
    stored_at_ms: int = 0
    _indexes: dict[tuple[str, bytes], int] = {}

    def index_of(self, subject: str, message_id: bytes) -> int:
        """The index of the record of this subject with this id. Requires: there is one."""
        if not self._indexes:
            self._indexes.update(
                ((name, record_message_id(record)), index)
                for index, (name, record) in enumerate(self.frame.records())
            )
        return self._indexes[subject, message_id]

    def place_of(self, index: int) -> tuple[str, int]:
        """Subject and sequence of a record."""
        for run, first_sequence in zip(self.frame.runs, self.first_sequences, strict=True):
            if index < run.count:
                return run.subject, first_sequence + index
            index -= run.count
        raise IndexError(index)

    @property
    def is_delayed(self) -> bool:
        """Whether its messages have no place in a queue yet, because they are not due."""
        return self.frame.header.kind in (FrameKind.DELAYED, FrameKind.RESCHEDULED)

    def places(self) -> tuple[SubjectPlace, ...]:
        """The places of its messages; empty for delayed messages."""
        if self.is_delayed:
            return ()
        return tuple(
            SubjectPlace(subject=run.subject, first_sequence=first_sequence, count=run.count)
            for run, first_sequence in zip(self.frame.runs, self.first_sequences, strict=True)
        )


class Withdrawn(msgspec.Struct):
    """The stored counterpart of messages that were withdrawn before they arrived."""


class Verdict(msgspec.Struct, kw_only=True, eq=False):
    """The decision about one frame of an append."""

    #: The part that is stored: the whole frame, only its new messages, or nothing.
    stored: StoredFrame | None
    #: Only with repeats: the place of each record of the request, in order, without withdrawn ones.
    origins: list[tuple[StoredFrame, int]] = []
    #: Number of records that were already stored.
    repeats: int = 0
    #: A message id that is already stored with other content; then nothing is stored.
    conflict: bytes | None = None

    def places(self) -> tuple[SubjectPlace, ...]:
        """The places of the request's records, new and old, with neighbours joined."""
        if self.conflict is not None:
            return ()
        if not self.origins:
            return self.stored.places() if self.stored is not None else ()
        placed = [each for each in self.origins if not each[0].is_delayed]
        return tuple(_join(origin.place_of(index) for origin, index in placed))


class RepeatFinder:
    """Judges the frames of one append, in order. Created for each append."""

    def __init__(
        self, window: DedupeWindow, read_frame: Callable[[int], StoredFrame | Withdrawn]
    ) -> None:
        """`read_frame` reads the frame at an offset of the log."""
        self._window = window
        self._read_frame = read_frame
        #: Ids of earlier frames of this append, by subject; the place is an index into `_earlier`.
        self._new_ids: defaultdict[str, RunTable] = defaultdict(RunTable)
        self._earlier: list[StoredFrame] = []
        #: How many of them the tables contain: the last frame is not needed.
        self._noted = 0

    def judge(self, frame: MessageFrame) -> Verdict:
        """Decide what to do with this frame."""
        ids = subject_ids(frame)
        known = self._window.find(ids)
        earlier = self._find_earlier(ids) if self._earlier else []
        if known or earlier or not all(map(_is_clean, ids.values())):
            verdict = self._sorted_out(frame, known, earlier)
        else:
            verdict = Verdict(stored=StoredFrame(frame=frame, ids=ids))
        if verdict.stored is not None:
            self._earlier.append(verdict.stored)
        return verdict

    def _find_earlier(self, ids: SubjectIds) -> list[Known]:
        for place, stored in enumerate(self._earlier[self._noted :], start=self._noted):
            for subject, runs in stored.ids.items():
                for run in runs:
                    self._new_ids[subject].add(run, place)
        self._noted = len(self._earlier)
        return [
            Known(subject, *found)
            for subject, runs in ids.items()
            if subject in self._new_ids
            for run in runs
            for found in self._new_ids[subject].find(run)
        ]

    def _readable(self, place: int) -> StoredFrame | Withdrawn | None:
        """Read a frame to compare with; None if it is damaged, so that its messages are stored again."""
        try:
            return self._read_frame(place)
        except CorruptionError as error:
            _log.warning("repeat of a damaged frame is stored again: reason=%s", error)
            return None

    def _sorted_out(
        self, frame: MessageFrame, known: Sequence[Known], earlier: Sequence[Known]
    ) -> Verdict:
        by_place = {one.place: self._readable(one.place) for one in known}
        sources: list[tuple[Known, StoredFrame | Withdrawn]] = []
        sources += [(one, found) for one in known if (found := by_place[one.place])]
        sources += [(one, self._earlier[one.place]) for one in earlier]
        fresh = StoredFrame(frame=frame, ids={})
        #: The new records of this frame, with their index in what will be stored.
        own: dict[tuple[str, bytes], tuple[int, bytes]] = {}
        verdict = Verdict(stored=None)
        for subject, record in frame.records():
            message_id = record_message_id(record)
            source = _source(sources, subject, message_id)
            if isinstance(source, Withdrawn):
                verdict.repeats += 1
                continue
            message = (subject, message_id)
            if source is None and message not in own:
                own[message] = (len(own), record)
                verdict.origins.append((fresh, len(own) - 1))
                continue
            if source is None:
                index, stored_record = own[message]
                source = fresh
            else:
                index = source.index_of(subject, message_id)
                stored_record = source.frame.record(index)
            if not is_same_message(stored_record, record):
                return Verdict(stored=None, conflict=message_id)
            verdict.origins.append((source, index))
            verdict.repeats += 1
        if own:
            new = [(subject, record) for (subject, _), (_, record) in own.items()]
            fresh.frame = _without_repeats(frame, new)
            fresh.ids = subject_ids(fresh.frame)
            verdict.stored = fresh
        return verdict


def is_same_message(record: bytes, other: bytes) -> bool:
    """Whether two records with one id and subject are the same message, sent twice.

    The creation time and times relative to it do not count, because sending again from a shell or
    another client makes a new record.
    """
    if record == other:
        return True
    if len(record) != len(other) or record[_HEAD] != other[_HEAD]:
        return False
    times, rest = _times(record)
    other_times, other_rest = _times(other)
    moved_ms = other_times[0] - times[0]
    is_as_late = all(
        after_ms - before_ms in (0, moved_ms)
        for before_ms, after_ms in zip(times, other_times, strict=True)
    )
    return is_as_late and rest == other_rest


def _times(record: bytes) -> tuple[list[int], bytes]:
    """The times of creation, due time and expiry, if given, and the bytes around them."""
    key_bytes, tags_bytes, headers_bytes = _LENGTHS.unpack_from(record, FLAGS_POSITION + 1)
    flags, parts, times = record[FLAGS_POSITION], [], [_TIME.unpack_from(record, _BORN_POSITION)[0]]
    position = RECORD_FIXED_BYTES
    if flags & DELAYED_FLAG:
        times.append(_TIME.unpack_from(record, position)[0])
        position += _TIME.size
    if flags & EXPIRES_FLAG:
        after = position + key_bytes + tags_bytes + headers_bytes
        parts.append(record[position:after])
        times.append(_TIME.unpack_from(record, after)[0])
        position = after + _TIME.size
    return times, b"".join((*parts, record[position:]))


def _is_clean(runs: Sequence[IdRun]) -> bool:
    """Whether no id is in these runs twice."""
    return len(runs) == 1 or all(map(_is_before, runs, runs[1:]))


def _is_before(run: IdRun, other: IdRun) -> bool:
    """Whether all ids of `run` are below those of `other`."""
    return (run.instance, run.next_counter) <= (other.instance, other.first_counter)


def _source(
    sources: Iterable[tuple[Known, StoredFrame | Withdrawn]], subject: str, message_id: bytes
) -> StoredFrame | Withdrawn | None:
    instance, counter = split_message_id(message_id)
    for (name, run, _), stored in sources:
        is_in = run.instance == instance and run.first_counter <= counter < run.next_counter
        if is_in and name == subject:
            return stored
    return None


def _without_repeats(frame: MessageFrame, records: Iterable[tuple[str, bytes]]) -> MessageFrame:
    by_subject: dict[str, list[bytes]] = {}
    for subject, record in records:
        by_subject.setdefault(subject, []).append(record)
    data = build_message_frame(by_subject, kind=frame.header.kind, limits=LOG_LIMITS)
    return parse_message_frame(data, LOG_LIMITS)


def _join(places: Iterable[tuple[str, int]]) -> Iterator[SubjectPlace]:
    """Places with neighbours of consecutive sequences joined."""
    subject, first, after = "", 0, 0
    for next_subject, sequence in places:
        if next_subject == subject and sequence == after:
            after += 1
            continue
        if after > first:
            yield SubjectPlace(subject=subject, first_sequence=first, count=after - first)
        subject, first, after = next_subject, sequence, sequence + 1
    yield SubjectPlace(subject=subject, first_sequence=first, count=after - first)
