"""The action log: every change of a group, in order. A snapshot and the actions after it restore all groups.

Frames of kind ACTIONS in a separate set of segments. Body: length 4 (big-endian), MessagePack list of
actions (`actions.py`), zero fill. If a power cut takes the newest actions, messages are
redelivered, never lost; so the service may sync at an interval.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import msgspec

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files.snapshots import GroupsContent, SnapshotFiles
from qmq_broker.storage.logs.actions import decode_actions
from qmq_broker.storage.logs.frame_scan import FrameScan, ScannedFrame, ScanSource
from qmq_broker.storage.logs.frame_seek import LogRange, offset_at
from qmq_broker.storage.logs.segmented_log import SegmentedLog
from qmq_broker.storage.logs.segments import Segments
from qmq_client.group.actions import Action
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FRAME_HEADER_BYTES, FrameKind, build_frame
from qmq_client.wire.requests import sized_part

#: The kinds of frames in the action log.
ACTION_KINDS: Final = frozenset({FrameKind.ACTIONS})
#: Actions per frame: a frame is encoded in memory, and a torn one is lost as a whole.
ACTIONS_PER_FRAME_MAX: Final = 1000
_LENGTH: Final = struct.Struct(">I")
_FRAME_TABLE_BYTES: Final = FRAME_HEADER_BYTES + _LENGTH.size + 8


def _by_nobody() -> AbstractContextManager[int]:
    return nullcontext(2**63 - 1)


class ActionLog:
    """Actions on disk. `append` belongs to one thread; `sync` may run in another meanwhile."""

    def __init__(
        self,
        log: SegmentedLog,
        segments: Segments,
        store_id: bytes,
        snapshots: SnapshotFiles,
        *,
        kept: Callable[[], AbstractContextManager[int]] = _by_nobody,
    ) -> None:
        """`kept` yields the offset below which keepers allow segments to be deleted."""
        self.log = log
        self._kept = kept
        self._segments = segments
        self._store_id = store_id
        self._snapshots = snapshots
        self._first_new_offset = log.written_offset
        newest = snapshots.newest
        #: The newest snapshot, with its content until `forget_snapshot`; None if there is none.
        self.snapshot_offset = 0 if newest is None else newest.snapshot.offset
        self.snapshot = None if newest is None else newest.content

    @property
    def snapshot_bytes(self) -> int:
        """Length of the newest snapshot."""
        newest = self._snapshots.newest
        return 0 if newest is None else newest.file_bytes

    @property
    def first_offset(self) -> int:
        """Where the log begins. For any thread."""
        return next(iter(self.log.bases()), self.log.written_offset)

    def append(self, actions: Sequence[Action]) -> None:
        """Append actions; handed to the operating system on return.

        Raises `NoRoomError` with nothing written, or `PoisonedError`.
        """
        if actions:
            self.log.append([(frame, ()) for frame in self._frames(actions)])

    def sync(self) -> None:
        """Make all actions appended before this call durable."""
        self.log.sync()

    def write_snapshot(self, offset: int, content: GroupsContent) -> int:
        """Store the state of the groups at `offset`, durable on return, then delete old segments.

        Requires: `content` is the effect of all actions below `offset`, and a frame ends there.
        Returns how many segments were deleted. May run parallel to `append`, in the thread of
        `sync`. Raises `NoRoomError` with nothing changed, or `PoisonedError`.
        """
        self.log.sync()
        self._snapshots.write(offset, content)
        self.snapshot_offset, self.snapshot = offset, None
        with self._kept() as kept_offset:
            given_up = self.log.give_up_below(min(self._snapshots.first_offset, kept_offset))
        self.log.put_away()
        return given_up

    def forget_snapshot(self) -> None:
        """Free the content of the snapshots: the groups are restored from it."""
        self.snapshot = None
        self._snapshots.forget_content()

    def replay(self) -> Iterator[Action]:
        """All actions after the snapshot that existed when the log was opened, in order.

        Raises `CorruptionError` where the log is damaged, and `UnknownFormatError` where a later
        version wrote it.
        """
        first_offset = self.snapshot_offset
        scan = FrameScan(
            self._segments, ACTION_KINDS, store_id=self._store_id, first_offset=first_offset
        )
        for frame in scan if self._first_new_offset > first_offset else ():
            if frame.offset >= self._first_new_offset:
                return
            if frame.header.kind is FrameKind.ACTIONS:
                yield from frame_actions(self._segments, frame)
        if scan.next_offset < self._first_new_offset:
            offset = scan.next_offset
            raise CorruptionError(
                segment=self._segments.path(offset), offset=offset, reason=scan.reason
            )

    def offsets_since(self, time_ms: int) -> LogRange:
        """The range of the log with the actions written at this time or later, as far as they still
        exist.

        May run parallel to `append`, in any thread. Raises `CorruptionError`.
        """
        next_offset = self.log.written_offset
        within = LogRange(min(self.first_offset, next_offset), next_offset)
        return LogRange(offset_at(self._segments, time_ms, within), next_offset)

    def between(self, within: LogRange) -> Iterator[tuple[int, list[Action]]]:
        """The actions of a part of the log, frame by frame, each with the offset after it.

        May run parallel to `append`, in any thread. Ends early where the log was deleted meanwhile.
        """
        scan = FrameScan(
            self._segments, ACTION_KINDS, store_id=self._store_id, first_offset=within.first_offset
        )
        for frame in scan:
            if frame.offset >= within.next_offset:
                return
            if frame.header.kind is FrameKind.ACTIONS:
                next_offset = frame.offset + frame.header.frame_bytes
                yield next_offset, frame_actions(self._segments, frame)

    def _frames(self, actions: Sequence[Action]) -> Iterator[bytes]:
        """Frames that fit in a segment: a list that does not fit is halved."""
        content = msgspec.msgpack.encode(actions)
        is_short = len(content) + _FRAME_TABLE_BYTES <= self.log.frame_bytes_max
        if len(actions) == 1 or (is_short and len(actions) <= ACTIONS_PER_FRAME_MAX):
            body = _LENGTH.pack(len(content)) + content
            yield build_frame(FrameKind.ACTIONS, body, record_count=len(actions))
            return
        half = len(actions) // 2
        yield from self._frames(actions[:half])
        yield from self._frames(actions[half:])


def frame_actions(segments: ScanSource, frame: ScannedFrame) -> list[Action]:
    """The actions of a frame; raises `CorruptionError`, or `UnknownFormatError` for later ones."""
    try:
        return decode_actions(sized_part(frame.data, FRAME_HEADER_BYTES))
    except ProtocolError as error:
        path = segments.path(frame.offset)
        raise CorruptionError(segment=path, offset=frame.offset, reason=str(error)) from error
