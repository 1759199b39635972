"""The position of a streaming query in the log of a store, as stored in its checkpoint."""

from __future__ import annotations

from typing import Any, Final

from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_client.wire.frame import FrameKind
from qmq_pipeline.errors import SourceError
from qmq_pipeline.places.log import LogBounds, LogReader
from qmq_pipeline.places.options import LogOptions

_STORE: Final = "store_id"
_OFFSET: Final = "offset"
_LAST: Final = "last_frame"


def position(
    store_id: str, offset: int, last_frame: tuple[int, int] | None = None
) -> dict[str, Any]:
    """An offset in the log of this store; `last_frame`: offset and checksum of the frame in front of it, if known."""
    # Spark sometimes compares offsets as text, so keys must always have the same order.
    return {_STORE: store_id, _OFFSET: offset, _LAST: list(last_frame) if last_frame else None}


def offset_of(found: dict[str, Any], store_id: str, options: LogOptions) -> int:
    """The offset of a position; raises `SourceError` for that of another store."""
    if found[_STORE] != store_id:
        raise SourceError(
            source=options.place.name,
            reason=f"the checkpoint is of store {found[_STORE]}, and this is {store_id}",
            remedy="Use another checkpoint location, or another folder of tables, for another broker",
        )
    return int(found[_OFFSET])


def check_same_log(found: dict[str, Any], log: LogReader, bounds: LogBounds, source: str) -> None:
    """Raise `SourceError` if the log is not the one in which this position was reached."""
    offset, last = int(found[_OFFSET]), found.get(_LAST)
    if offset <= bounds.next_offset and (last is None or log.has_stamp(int(last[0]), int(last[1]))):
        return
    if last is not None and _is_in_quarantine(log, int(last[0]), offset):
        return
    raise SourceError(
        source=source,
        reason=f"its log is not the one that was read up to offset {offset}: was it restored from a backup?",
        remedy="Read it with another checkpoint location, or into another folder of tables",
    )


def _is_in_quarantine(log: LogReader, offset: int, next_offset: int) -> bool:
    """Whether the broker has quarantined the frame that was read last: a LOST frame is there."""
    try:
        return any(
            frame.header.kind is FrameKind.LOST
            and frame.offset <= offset < frame.offset + frame.header.frame_bytes
            for frame in log.frames(LogRange(offset - offset % log.segment_bytes, next_offset))
        )
    except SourceError:  # it is another log, with other frame boundaries
        return False
