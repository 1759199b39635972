"""Quarantined ranges of a log: a read that reaches one fails, unless the options say to skip it.

The log has frames of kind LOST there. The first frame of such a range lists the lost sequences;
lost delayed messages and actions are unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from qmq_broker.storage.logs.frame_scan import ScannedFrame
from qmq_broker.storage.logs.lost import lost_runs
from qmq_client.wire.frame import FrameKind
from qmq_pipeline.errors import QuarantinedRangeError
from qmq_pipeline.places.options import LogOptions
from qmq_pipeline.tables.schemas import ACTIONS, LOG, MESSAGES, SCHEDULED
from qmq_pipeline.tables.sequences import Runs, named

_NOUNS: Final = {SCHEDULED: "delayed messages", ACTIONS: "actions"}


def without_quarantined(
    frames: Iterable[ScannedFrame], options: LogOptions
) -> Iterator[ScannedFrame]:
    """The frames, unless requested messages among them are in quarantine.

    Raises `QuarantinedRangeError` after the frames in front of it.
    """
    for frame in frames:
        if frame.header.kind is FrameKind.LOST and not options.passes_quarantined:
            lost: dict[str, list[tuple[int, int]]] = {}
            for one in lost_runs(frame):
                run = (one.first_sequence, one.first_sequence + one.count)
                lost.setdefault(one.subject, []).append(run)
            _refuse(lost, frame.offset, options)
        yield frame


def _refuse(lost: Runs, offset: int, options: LogOptions) -> None:
    """Raise `QuarantinedRangeError` if the options request messages that were lost at this offset."""
    if options.table in (MESSAGES, LOG):
        subjects = options.subjects
        wanted = {name: runs for name, runs in lost.items() if subjects is None or name in subjects}
        if not wanted:
            return
        what = named(wanted)
    else:
        what = f"it is not known which {_NOUNS[options.table]} were lost"
    raise QuarantinedRangeError(
        source=options.place.name,
        reason=f"a part of the log from offset {offset} on was damaged, and the broker has it in quarantine "
        f"({what})",
        remedy="Restore a copy, or skip it with the option quarantined=pass",
    )
