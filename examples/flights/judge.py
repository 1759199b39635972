"""The judge: what came out, compared with the CSV file and with the history of the run.

Two questions, answered apart: do the tallies equal the counts made by hand from the file
(`expected.py`), and does the history of all processes keep every promise (`tests/kit/checker.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from examples.flights.database import read
from examples.flights.events import fingerprint
from examples.flights.expected import Expected, Tally
from examples.flights.plan import BOARD, COUNTER, SUBJECTS, TALLIES, Plan
from qmq_broker.options import StoreOptions
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.store import Store
from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.message import record_to_message
from qmq_client.wire.record import decode_record
from tests.kit.checker import check
from tests.kit.events import AnyEvent, Attempt, Effect, Stored, Truth
from tests.kit.expectations import Group, Promises
from tests.kit.history import SUFFIX, History, read_histories
from tests.kit.verdict import Verdict

#: Messages read from the broker's files at once.
READ_MESSAGES = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The outcome of a run."""

    #: Tallies that differ from the counts by hand: place → (by hand, counted).
    differences: dict[tuple[str, str, str, str], tuple[int, int]]
    #: The same for the rows of the board.
    board: tuple[int, int]
    #: The same for the delayed messages, which came at their time: those that were tallied.
    delayed: tuple[int, int]
    stored: int
    verdict: Verdict

    @property
    def ok(self) -> bool:
        """Nothing lost, no ghost, nothing doubled, everything equal to the file."""
        return not self.differences and self.board[0] == self.board[1] and self.verdict.ok


def judge(plan: Plan, expected: Expected) -> Judgement:
    """Judge a run that has drained; every process has stopped. May be repeated."""
    (plan.path("history") / f"judge{SUFFIX}").unlink(missing_ok=True)
    events = read_histories(plan.path("history"))
    stored = list(read_stored(plan))
    found: list[AnyEvent] = [*stored, *_truths(plan, events), *_effects(plan)]
    with History.open(plan.path("history"), "judge") as history:
        history.write(*found)
    groups = {
        TALLIES: Group(subjects=frozenset(SUBJECTS), has_effects=True),
        COUNTER: Group(subjects=frozenset(SUBJECTS), has_effects=False),
    }
    verdict = check([*events, *found], groups=groups, promises=Promises())
    tallies = _tallies(plan)
    delayed = sum(n for (event, *_), n in tallies.items() if event == "boarding_closes")
    return Judgement(
        differences=_differences(expected.tallies, tallies),
        board=(expected.committed, len(_board(plan))),
        delayed=(expected.messages["boarding_closes"], delayed),
        stored=len(stored),
        verdict=verdict,
    )


def read_stored(plan: Plan) -> Iterator[Stored]:
    """Every message in the files of the broker, which has stopped."""
    store = Store.open(OsDisk(str(plan.path("broker"))), SYSTEM_CLOCK, StoreOptions())
    try:
        for subject in store.subjects():
            queue = store.queue(subject)
            assert queue is not None
            for first in range(queue.first_sequence, queue.next_sequence, READ_MESSAGES):
                entries = queue.entries(first, READ_MESSAGES)
                for index, data in enumerate(store.read_records(entries, subject=subject)):
                    message = record_to_message(decode_record(subject, data))
                    yield Stored(
                        message_id=message.message_id or "",
                        subject=subject,
                        sequence=first + index,
                        offset=entries[index].physical_offset,
                        body_hash=fingerprint(message.body, message.key),
                    )
    finally:
        store.close()


def _truths(plan: Plan, events: list[AnyEvent]) -> list[Truth]:
    """Which transactions stand, as the board says."""
    rows = _board(plan)
    standing = {transaction_id for transaction_id, _ in rows}
    standing |= {f"{transaction_id}.arrival" for transaction_id, arrived in rows if arrived}
    tried = {event.transaction_id for event in events if isinstance(event, Attempt)}
    return [Truth(transaction_id=one, is_committed=one in standing) for one in tried]


def _board(plan: Plan) -> list[Any]:
    return read(plan.databases[BOARD], "SELECT transaction_id, has_arrived FROM board")


def _effects(plan: Plan) -> list[Effect]:
    rows = read(
        plan.databases[TALLIES], "SELECT message_id, count(*) FROM effects GROUP BY message_id"
    )
    return [Effect(group=TALLIES, message_id=one, times=times) for one, times in rows]


def _tallies(plan: Plan) -> Tally:
    rows = read(plan.databases[TALLIES], "SELECT event, airport, carrier, day, count FROM tallies")
    return Counter({(event, airport, carrier, day): n for event, airport, carrier, day, n in rows})


def _differences(
    by_hand: Tally, counted: Tally
) -> dict[tuple[str, str, str, str], tuple[int, int]]:
    return {
        place: (by_hand[place], counted[place])
        for place in by_hand.keys() | counted.keys()
        if by_hand[place] != counted[place]
    }
