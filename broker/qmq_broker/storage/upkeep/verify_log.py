"""The verification of a log as a whole: its end, its holes, its sequences.

It uses the results of each segment (`verify_segment.py`) and the rules of a start
(`log_recovery.py`). Bytes without a good frame are damage if the checkpoint, a later frame, or a
file written after a sync shows that they had been durable. Bytes after that are a torn tail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.faults import NOT_STARTED, Fault, damaged
from qmq_broker.storage.upkeep.inspect_log import DamagedRange, SegmentSurvey, SequenceRun

_STARTS: Final = (
    "The broker starts, but refuses every pull that reaches these messages, and cannot rebuild "
    "the consume queues."
)
_KEPT: Final = "The broker starts. An archive without these actions cannot read them."
_PUT_BACK: Final = "Put the segment back from a copy of this directory, or begin another archive."
#: Most missing segments that are reported one by one; more than the largest disks hold come from an invalid offset.
MISSING_SEGMENTS_MAX: Final = 100_000
_LOST: Final = "These messages cannot be read."


@dataclass(frozen=True, slots=True, kw_only=True)
class LogClaims:
    """The requirements of other files on one log."""

    log: str
    segment_bytes: int
    #: The beginning of the log, and of a segment.
    first_offset: int
    #: The offset up to which the log was synced, and the file that says so.
    durable_offset: int
    claimed_by: str
    #: A start reads from this offset on, and needs the head of every segment up to it.
    start_offset: int
    unbroken_offset: int
    #: The first existing sequence of each subject with deleted messages.
    first_sequences: Mapping[str, int] = field(default_factory=dict)


class LostSequences(NamedTuple):
    """Sequences of one subject without a good frame."""

    subject: str
    first: int
    next: int
    #: They were between the frames at these offsets; the second is the end of the log if they are last.
    after_offset: int
    before_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogVerdict:
    """A log as a whole."""

    #: First byte after the good frames.
    next_offset: int
    damaged: list[DamagedRange]
    #: The end of each subject's sequences.
    next_sequences: dict[str, int]
    lost: list[LostSequences]
    #: Holes, and the sequences lost in them.
    faults: list[Fault]
    #: Faults that no hole explains.
    unexplained: list[Fault]
    #: Offset of the last frame of each subject.
    last_offsets: dict[str, int]
    #: The epoch of the last good frame.
    epoch: int


def judge_log(surveys: Sequence[SegmentSurvey], claims: LogClaims) -> LogVerdict:
    """Judge a log. Requires: the surveys of all its segments, in order, from its beginning on."""
    durable_offset, claimed_by = claims.durable_offset, claims.claimed_by
    for survey in surveys:
        if survey.durable_claim > durable_offset:
            durable_offset, claimed_by = survey.durable_claim, "a later frame"
    bad = list(_bad_ranges(surveys, claims, durable_offset))
    torn = next((one for one in bad if one.first_offset >= durable_offset), None)
    holes = [one for one in bad if one.first_offset < durable_offset]
    if torn is not None:
        next_offset = torn.first_offset
    elif holes and holes[-1].next_offset > durable_offset:
        # No good frame follows the synced part: the log ends in the hole.
        holes[-1] = holes[-1]._replace(next_offset=durable_offset)
        next_offset = durable_offset
    else:
        next_offset = surveys[-1].base + claims.segment_bytes if surveys else claims.first_offset
    faults = [_hole(hole, claims, claimed_by, durable_offset) for hole in holes]
    good = [survey for survey in surveys if survey.base < next_offset]
    found = _Sequences(claims, next_offset, holes)
    for survey in good:
        found.add(survey)
    faults += [lost_fault(claims.log, one.subject, one.first, one.next) for one in found.lost]
    return LogVerdict(
        next_offset=next_offset,
        damaged=holes,
        next_sequences=found.next_sequences,
        lost=found.lost,
        faults=faults,
        unexplained=[*_epochs(good, claims), *found.unexplained],
        last_offsets=found.last_offsets,
        epoch=max((survey.last_epoch for survey in good), default=0),
    )


def lost_fault(log: str, subject: str, first: int, next_: int) -> Fault:
    """The fault for accepted messages that no frame holds."""
    return damaged(
        log,
        f"messages of {subject} with sequences {first} to {next_ - 1} are lost ({next_ - first})",
        meaning=_LOST,
    )


def _bad_ranges(
    surveys: Sequence[SegmentSurvey], claims: LogClaims, durable_offset: int
) -> Iterator[DamagedRange]:
    """Ranges without good frames, and missing segments, in order, up to the first gap."""
    by_base = {survey.base: survey for survey in surveys}
    base = claims.first_offset
    missing = 0
    while base in by_base or base < durable_offset:
        survey = by_base.get(base)
        if survey is None:
            missing += 1
            if missing > MISSING_SEGMENTS_MAX:
                reason = (
                    f"segment is missing, like {missing - 1} before it: not a log of this program"
                )
                path = layout.segment_path(claims.log, base)
                raise CorruptionError(segment=path, offset=base, reason=reason)
            yield DamagedRange(base, base + claims.segment_bytes, "segment is missing")
        else:
            yield from survey.damaged
        base += claims.segment_bytes


def _hole(hole: DamagedRange, claims: LogClaims, claimed_by: str, durable_offset: int) -> Fault:
    is_head = not hole.first_offset % claims.segment_bytes
    is_looked_at = is_head and hole.first_offset < claims.unbroken_offset
    is_read = hole.next_offset > claims.start_offset or is_looked_at
    what = (
        f"{hole.next_offset - hole.first_offset} bytes up to offset {hole.next_offset} are damaged: "
        f"{hole.reason}; {claimed_by} says synced up to offset {durable_offset}"
    )
    base = hole.first_offset - hole.first_offset % claims.segment_bytes
    path = layout.segment_path(claims.log, base)
    if not is_read and claims.log == layout.ACTION_LOG:
        return damaged(path, what, meaning=_KEPT, offset=hole.first_offset, remedy=_PUT_BACK)
    meaning = NOT_STARTED if is_read else _STARTS
    return damaged(path, what, meaning=meaning, offset=hole.first_offset)


def _epochs(surveys: Iterable[SegmentSurvey], claims: LogClaims) -> Iterator[Fault]:
    epoch = 0
    for survey in surveys:
        if survey.last_frame_offset < 0:
            continue
        if survey.first_epoch < epoch:
            what = (
                f"frames of an earlier start (epoch {survey.first_epoch}) after those of a later one "
                f"(epoch {epoch})"
            )
            yield damaged(layout.segment_path(claims.log, survey.base), what, offset=survey.base)
        epoch = survey.last_epoch


class _Sequences:
    """The next sequence of each subject, its sequences lost in holes, and unexplained faults."""

    def __init__(self, claims: LogClaims, next_offset: int, holes: Sequence[DamagedRange]) -> None:
        self._claims = claims
        self._next_offset = next_offset
        self._holes = holes
        self.next_sequences = dict(claims.first_sequences)
        self.last_offsets: dict[str, int] = {}
        self.lost: list[LostSequences] = []
        self.unexplained: list[Fault] = []

    def add(self, survey: SegmentSurvey) -> None:
        """Add the next segment."""
        for subject, runs in survey.runs.items():
            for run in runs:
                if run.offset < self._next_offset:
                    self._add_run(survey.base, subject, run)

    def _add_run(self, base: int, subject: str, run: SequenceRun) -> None:
        expected = self.next_sequences.get(subject, 0)
        after_offset = self.last_offsets.get(subject, -1)
        if run.first != expected:
            holes = [one for one in self._holes if after_offset < one.first_offset < run.offset]
            if run.first > expected and holes:
                lost = LostSequences(subject, expected, run.first, after_offset, run.offset)
                self.lost.append(lost)
            else:
                what = f"sequence {run.first} of {subject}, whose next is {expected}"
                path = layout.segment_path(self._claims.log, base)
                self.unexplained.append(damaged(path, what, offset=run.offset))
        self.next_sequences[subject] = run.next
        self.last_offsets[subject] = run.last_offset
