"""P3: between the first and the last row of a subject none is missing, or the job fails.

Sequences of a subject are dense in the log. What was ingested before ends at some sequence, and
what follows must begin there, unless a quarantined or expired range explains the gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qmq_pipeline.errors import IncompleteError
from qmq_pipeline.tables.commits import EXPIRED, RangeFacts


def next_sequences(
    known: Mapping[str, int], ranges: Iterable[RangeFacts], *, is_from_start: bool
) -> dict[str, int]:
    """The next sequence of each subject after these ranges, given where it was before.

    `is_from_start`: the log is read from its very beginning, so a new subject begins at 0. Raises
    `IncompleteError`. Requires: ranges in order of the log.
    """
    expected = dict(known)
    for facts in ranges:
        if facts.notes.get(EXPIRED):
            expected, is_from_start = {}, False
        for subject in {*facts.sequences, *facts.lost}:
            runs = [*facts.sequences.get(subject, ()), *facts.lost.get(subject, ())]
            for first, after in sorted((int(one[0]), int(one[1])) for one in runs):
                wanted = expected.get(subject, 0 if is_from_start else first)
                if first != wanted:
                    raise IncompleteError(
                        subject=subject,
                        first_sequence=min(wanted, first),
                        next_sequence=max(wanted, first),
                    )
                expected[subject] = after
    return expected
