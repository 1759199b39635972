"""The messages of one group in one part of the log, as arrays to which steps are applied, and as
rows of `deliveries`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qmq_pipeline.fold import steps
from qmq_pipeline.fold.steps import Step
from qmq_pipeline.tables.columns import TIME, Numbers
from qmq_pipeline.tables.schemas import DELIVERIES

#: Names of the outcomes; the arrays hold their index.
OUTCOMES: Final = (
    "",
    "in flight",
    "returned",
    "acked",
    "dead",
    "skipped",
    "filtered",
    "waiting",
    "long retry",
)
NONE, IN_FLIGHT, RETURNED, ACKED, DEAD, SKIPPED, FILTERED, WAITING, LONG_RETRY = range(
    len(OUTCOMES)
)
_OPEN: Final = (NONE, IN_FLIGHT, RETURNED, WAITING, LONG_RETRY)
#: Outcomes whose messages retention deletes by force: not in flight, and without a copy.
_DELETED: Final = (NONE, RETURNED, WAITING)
_STATE: Final = np.dtype(
    [
        ("first_us", "i8"),
        ("last_us", "i8"),
        ("settled_us", "i8"),
        ("retry_us", "i8"),
        ("back_us", "i8"),
        ("attempts", "i4"),
        ("text", "i4"),
        ("outcome", "i1"),
    ]
)
_TIMES: Final = {
    "first_us": "first_delivered_at",
    "last_us": "last_delivered_at",
    "settled_us": "settled_at",
    "retry_us": "long_retry_at",
    "back_us": "redelivered_at",
}
_AT, _ATTEMPT, _TEXT, _NEVER = "at", "attempt", "text", "never"
_SETTLED: Final = {"settled_us": _AT}
_TOLD: Final = {"settled_us": _AT, "text": _TEXT}
#: For each kind of step: the outcomes that it applies to (None for all), the new outcome, and the columns that
#: it sets. The log has a dead letter before the end of the delivery that caused it, so only messages in flight
#: are returned.
MOVES: Final[dict[str, tuple[tuple[int, ...] | None, int, dict[str, str]]]] = {
    steps.PULLED: (
        None,
        IN_FLIGHT,
        {"last_us": _AT, "settled_us": _NEVER, "attempts": _ATTEMPT},
    ),
    steps.ACKED: (None, ACKED, _SETTLED),
    steps.RETURNED: ((IN_FLIGHT,), RETURNED, {"text": _TEXT}),
    steps.DEAD: (None, DEAD, {**_TOLD, "attempts": _ATTEMPT}),
    steps.LONG_RETRY: ((RETURNED,), LONG_RETRY, {"retry_us": _AT, "back_us": _NEVER}),
    steps.REDELIVERED: ((LONG_RETRY,), RETURNED, {"back_us": _AT}),
    steps.REPLAYED: ((DEAD,), RETURNED, {"settled_us": _NEVER}),
    steps.WAITING: ((NONE,), WAITING, {}),
    steps.FILTERED: ((NONE,), FILTERED, _SETTLED),
    steps.PASSED_OVER: ((NONE,), SKIPPED, _TOLD),
    steps.GIVEN_UP: (_OPEN, SKIPPED, _TOLD),
    steps.GIVEN_UP_BY_FORCE: (_DELETED, SKIPPED, _TOLD),
}
#: How many steps are Python objects at the same time.
_STEPS_AT_ONCE: Final = 10_000


class Texts:
    """Reasons and errors of one group, each pair once; the arrays hold their numbers."""

    def __init__(self) -> None:
        self._pairs: list[tuple[str | None, str | None]] = [(None, None)]
        self._numbers = {self._pairs[0]: 0}

    def number(self, reason: str | None, error: str | None) -> int:
        """The number of this pair; an empty text counts as none."""
        pair = (reason or None, error or None)
        number = self._numbers.get(pair)
        if number is None:
            number = self._numbers[pair] = len(self._pairs)
            self._pairs.append(pair)
        return number

    def numbers(self, reasons: pa.Array, errors: pa.Array) -> Numbers:
        """The numbers of many pairs."""
        pairs = zip(reasons.to_pylist(), errors.to_pylist(), strict=True)
        return np.fromiter((self.number(*pair) for pair in pairs), np.int32, len(reasons))

    def arrays(self, numbers: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Reasons and errors for these numbers."""
        reasons = pa.array([one[0] for one in self._pairs], pa.string())
        errors = pa.array([one[1] for one in self._pairs], pa.string())
        return reasons.take(numbers), errors.take(numbers)


class Block:
    """The states of a range of sequences of one group."""

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.texts = Texts()
        self.state = np.zeros(count, _STATE)

    @classmethod
    def of(cls, some: pa.Table, known: pa.Table) -> Block:
        """A block for these steps and these rows of `deliveries`, with the state of the rows."""
        firsts = [pc.min(some["first"]).as_py(), pc.min(known["sequence"]).as_py()]
        nexts = [pc.max(some["next"]).as_py(), (pc.max(known["sequence"]).as_py() or -1) + 1]
        first = min(one for one in firsts if one is not None)
        block = cls(first, max(one for one in nexts if one is not None) - first)
        block._load(known)
        return block

    def _load(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        places = rows["sequence"].to_numpy() - self.first
        for field, name in _TIMES.items():
            self.state[field][places] = rows[name].cast(pa.int64()).fill_null(0).to_numpy()
        self.state["attempts"][places] = rows["attempts"].to_numpy()
        encoded = rows["outcome"].combine_chunks().dictionary_encode()
        numbers = np.array([OUTCOMES.index(one) for one in encoded.dictionary.to_pylist()], np.int8)
        self.state["outcome"][places] = numbers[encoded.indices.to_numpy()]
        reasons, errors = (rows[name].combine_chunks() for name in ("reason", "error"))
        if reasons.null_count + errors.null_count < 2 * len(reasons):
            self.state["text"][places] = self.texts.numbers(reasons, errors)

    def apply_all(self, some: pa.Table) -> None:
        """Apply steps, which are in order."""
        for batch in some.select(list(Step._fields)).to_batches(max_chunksize=_STEPS_AT_ONCE):
            for row in batch.to_pylist():
                self.apply(Step(**row))

    def apply(self, step: Step) -> None:
        """Apply one step to all messages of its range."""
        state = self.state[step.first - self.first : step.next - self.first]
        if step.op == steps.RESET:
            state[...] = 0
            return
        kinds, outcome, fields = MOVES[step.op]
        mask = np.ones(len(state), bool) if kinds is None else np.isin(state["outcome"], kinds)
        if step.op == steps.PULLED:
            state["first_us"] = np.where(state["first_us"] == 0, step.at, state["first_us"])
        values = {
            _AT: step.at,
            _ATTEMPT: step.attempt,
            _TEXT: self.texts.number(step.reason, step.error),
            _NEVER: 0,
        }
        for name, value in fields.items():
            state[name][mask] = values[value]
        state["outcome"][mask] = outcome

    def rows(self, subject: str, group: str, part: int, folded_to: int) -> pa.Table:
        """Rows of the known messages, in order of sequence."""
        places = np.flatnonzero(self.state["outcome"])
        state = self.state[places]
        reasons, errors = self.texts.arrays(pa.array(np.ascontiguousarray(state["text"])))
        values = {
            "subject": pa.repeat(pa.scalar(subject), len(places)),
            "consumer_group": pa.repeat(pa.scalar(group), len(places)),
            "sequence": pa.array(places.astype(np.int64) + self.first),
            **{name: _times(state[field]) for field, name in _TIMES.items()},
            "attempts": pa.array(np.ascontiguousarray(state["attempts"])),
            "outcome": pa.array(OUTCOMES).take(pa.array(state["outcome"].astype(np.int32))),
            "reason": reasons,
            "error": errors,
            "folded_to": pa.repeat(pa.scalar(folded_to, pa.int64()), len(places)),
            "part": pa.repeat(pa.scalar(part, pa.int64()), len(places)),
        }
        return pa.table([values[name] for name in DELIVERIES.names], schema=DELIVERIES.arrow())


def _times(microseconds: Numbers) -> pa.Array:
    values = np.ascontiguousarray(microseconds)
    return pa.array(values, mask=values == 0).view(TIME)
