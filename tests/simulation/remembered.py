"""What the broker must know again: the ids that it took last, over all its lives (B7).

Judged where a frame is taken and not by what stands in the queues at the end: a delayed message has its
place when it is released, and is as old as its sending. Nothing here knows the product's window.
"""

from __future__ import annotations

from collections.abc import Sequence

from qmq_broker.storage.store import Placed
from qmq_client.wire.frame import FrameKind, MessageFrame
from qmq_client.wire.message_id import format_message_id
from qmq_client.wire.names import OWN_PREFIX

_SENT = frozenset({FrameKind.MESSAGES, FrameKind.DELAYED})
#: Below every offset: kept over each restart.
_SOMEWHERE = -1


class Remembered:
    """The ids in the order in which they were stored; those of copies are promised to nobody."""

    def __init__(self, ids_max: int) -> None:
        """`ids_max` are promised to be known."""
        #: What was found wrong, in sentences.
        self.faults: list[str] = []
        #: Ids that came again when they were promised to nobody any more, and were perhaps stored anew.
        self.anew: set[bytes] = set()
        self._ids_max = ids_max
        #: Offset and id; None for one that took room, and nobody knows which it was.
        self._taken: list[tuple[int, bytes | None]] = []

    def on_begin(self, next_offset: int) -> None:
        """A life goes on behind what the one before left; what it lost may be stored again."""
        self._taken = [one for one in self._taken if one[0] < next_offset]

    def on_taken(self, frames: Sequence[MessageFrame], placed: Sequence[Placed]) -> None:
        """The broker has said of each frame what is new in it, and written that."""
        for frame, place in zip(frames, placed, strict=True):
            if _is_of_a_client(frame) and place.conflict is None:
                self._take(frame.message_ids(), place)

    def on_failure(self, frames: Sequence[MessageFrame]) -> None:
        """Nobody knows what of these frames is in the log."""
        for frame in filter(_is_of_a_client, frames):
            self._taken += [(_SOMEWHERE, None)] * len(frame.message_ids())

    def _take(self, ids: Sequence[bytes], place: Placed) -> None:
        promised = {one for _, one in self._taken[-self._ids_max :]}
        before = {one for _, one in self._taken}
        different = dict.fromkeys(ids)
        known = [one for one in different if one in promised]
        perhaps = [one for one in different if one in before and one not in promised]
        fresh = [one for one in different if one not in before]
        if place.duplicates < len(known) + len(ids) - len(different):
            names = ", ".join(map(format_message_id, known))
            self.faults.append(
                f"B7: of {len(ids)} messages {place.duplicates} were known, and {names} must have been"
            )
        stored = len(ids) - place.duplicates
        named: list[bytes | None] = [*fresh]
        if stored > len(fresh):
            self.anew.update(perhaps)
        if stored == len(fresh) + len(perhaps):
            named += perhaps
        named += [None] * (stored - len(named))
        self._taken += [(place.physical_offset, one) for one in named]


def _is_of_a_client(frame: MessageFrame) -> bool:
    is_own = frame.runs[0].subject.startswith(OWN_PREFIX)
    return frame.header.kind in _SENT and not is_own
