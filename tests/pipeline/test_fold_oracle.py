"""The fold against the state machine that the broker runs: one history of actions, the same outcome of each message."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from qmq_client import Message
from qmq_client.group.actions import (
    Acked,
    Action,
    BroughtBack,
    Configured,
    GroupDefined,
    MovedBack,
    Replayed,
    SetAside,
    Skipped,
    Sought,
)
from qmq_client.group.apply import apply_action
from qmq_client.group.key_queues import key_number
from qmq_client.group.settings import settings_of
from qmq_client.ids import MESSAGE_IDS
from qmq_client.message import message_to_record
from qmq_client.transport.memory_group import MemoryGroup, MemoryQueue
from qmq_client.wire.record import encode_record, record_key
from qmq_client.wire.requests import Nack, PullRequest, Reject, Settlement, Tags
from qmq_pipeline.fold.steps import GroupMark
from tests.pipeline.test_fold import AT_MS, Fold, rows_of

SUBJECT, GROUP = "orders", "billing"
CONSUMERS = ("c1", "c2", "c3")
PULL = PullRequest(subject=SUBJECT, group=GROUP, consumer="c1", lease_ms=1_000, max_attempts=3)
RED, BOTH = Tags(all=("red",)), Tags(any=("red", "blue"))
KINDS = {
    "plain": PULL,
    "filtered": replace(PULL, tags=BOTH),
    "ordered": replace(PULL, ordered=True),
    "ordered and filtered": replace(PULL, ordered=True, tags=RED),
}


class Oracle(MemoryGroup):
    """A group that remembers its actions, and of messages that are done, how."""

    def __init__(self, request: PullRequest) -> None:
        defined = GroupDefined(AT_MS, SUBJECT, GROUP, 0, request.max_attempts)
        super().__init__(defined)
        self.actions: list[Action] = [defined]
        self.acked: set[int] = set()
        self.replayed: set[int] = set()
        self.write([Configured(AT_MS, SUBJECT, GROUP, settings_of(request))])

    def write(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self.actions.append(action)
            match action:
                case Acked():
                    log = self.state.consumer(action.consumer)
                    assert log is not None
                    held = [log.at(number) for number in range(action.first, action.next)]
                    for number, lease in enumerate(held, start=action.first):
                        assert lease is not None
                        self.acked.add(lease.first_sequence + number - lease.first)
                case Replayed():
                    self.replayed |= set(self.state.dead_between(action.first, action.next))
                case Sought(sequence=next_) | MovedBack(next=next_):
                    self.acked = {one for one in self.acked if one < next_}
                    self.replayed = {one for one in self.replayed if one < next_}
            apply_action(self.state, action)

    def outcomes(self) -> dict[int, str]:
        """The outcome of each message that the group has come past; messages not for it are skipped."""
        state = self.state
        found = {one: "acked" if one in self.acked else "skipped" for one in range(state.cursor)}
        if state.by_key is not None:
            for one, _ in state.by_key.sequences():
                found[one] = "returned" if one in self.replayed else "waiting"
        for run in state.redeliveries.runs():
            found |= dict.fromkeys(range(run.first, run.next), "returned")
        for away in state.long_retries.runs.runs():
            found |= dict.fromkeys(range(away.first, away.next), "long retry")
        for _, log in state.consumers():
            for lease in log.leases():
                found |= dict.fromkeys(
                    range(lease.first_sequence, lease.next_sequence), f"in flight {lease.attempt}"
                )
        return found | {one: f"dead {letter.attempts}" for one, letter in state.dead.items()}


class History:
    """Everything that happens to one group, drawn by lot."""

    def __init__(self, draw: random.Random, request: PullRequest) -> None:
        self._draw = draw
        self.group = Oracle(request)
        self._records: list[bytes] = []
        self._now_ms = AT_MS
        self._retry_ids = itertools.count(1)

    def go_on(self) -> None:
        """One step."""
        self._now_ms += self._draw.choice((1, 1, 10, 400))
        steps = [self._send, self._pull, self._pull, self._settle, self._settle, self._settle]
        rare = [
            self._seek,
            self._replay,
            self._lose,
            self._begin_long_retry,
            self._end_long_retry,
            self._cut,
        ]
        self._draw.choice(steps if self._draw.random() < 0.93 else rare)()

    def _send(self) -> None:
        draw = self._draw
        for _ in range(draw.randint(1, 6)):
            message = Message(
                SUBJECT,
                b"",
                key=draw.choice((None, "a", "b", "c")),
                tags=draw.choice(((), ("red",), ("blue",), ("green",))),
                ttl=draw.choice((None, None, 0.5)),
            )
            made = message_to_record(message, new_id=MESSAGE_IDS.next_id(), now_ms=self._now_ms)
            self._records.append(encode_record(made))

    def _pull(self) -> None:
        request = replace(
            PULL, consumer=self._draw.choice(CONSUMERS), max_messages=self._draw.randint(1, 6)
        )
        queue = MemoryQueue(self._records)
        self.group.take(request, queue, token=1, now_ms=self._now_ms)

    def _settle(self) -> None:
        consumer = self._draw.choice(CONSUMERS)
        log = self.group.state.consumer(consumer)
        if log is None or not len(log.leases()):
            return
        lease = self._draw.choice(list(log.leases()))
        first = self._draw.randrange(lease.first, lease.next)
        given = (first, self._draw.randrange(first, lease.next) + 1)
        settlement = self._draw.choice(
            (
                Settlement(token=1, acks=(given,)),
                Settlement(token=1, acks=(given,)),
                Settlement(token=1, nacks=(Nack(range=given, delay_ms=50, error="no"),)),
                Settlement(token=1, nacks=(Nack(range=given, delay_ms=0, was_begun=False),)),
                Settlement(token=1, rejects=(Reject(range=given, reason="never"),)),
            )
        )
        self.group.settle(consumer, (settlement,), self._now_ms)

    def _seek(self) -> None:
        to = self._draw.randint(0, len(self._records))
        self.group.write([Sought(self._now_ms, SUBJECT, GROUP, to)])

    def _replay(self) -> None:
        dead = sorted(self.group.state.dead)
        if dead:
            keys = tuple(key_number(record_key(self._records[one])) for one in dead)
            where = (self._now_ms, SUBJECT, GROUP)
            self.group.write([Replayed(*where, dead[0], dead[-1] + 1, keys)])

    def _lose(self) -> None:
        """Retention by force takes what comes next for the group."""
        first, where = self.group.state.cursor, (self._now_ms, SUBJECT, GROUP)
        waiting = next(self.group.state.redeliveries.runs(), None)
        begin = first if waiting is None else min(first, waiting.first)
        end = min(begin + 3, len(self._records))
        if begin < end:
            for gone in self.group.state.long_retries.without_copies(begin, end):
                self.group.write([Skipped(*where, *gone)])

    def _begin_long_retry(self) -> None:
        runs = list(self.group.state.redeliveries.runs())
        if runs:
            run = self._draw.choice(runs)
            where = (self._now_ms, SUBJECT, GROUP)
            self.group.write([SetAside(*where, run.first, run.next, next(self._retry_ids))])

    def _end_long_retry(self) -> None:
        runs = list(self.group.state.long_retries.runs.runs())
        if runs:
            run, copy = self._draw.choice(runs), self._draw.choice((None, 7))
            self.group.write([BroughtBack(self._now_ms, SUBJECT, GROUP, run.first, copy)])

    def _cut(self) -> None:
        """A power cut took the newest messages."""
        end = max(0, len(self._records) - self._draw.randint(0, 4))
        del self._records[end:]
        self.group.write([MovedBack(self._now_ms, SUBJECT, GROUP, end, 0)])


def folded(fold: Fold) -> dict[int, str]:
    """The outcome of each message, in the words of the oracle."""
    found = {}
    for sequence, row in rows_of(fold).items():
        outcome = "skipped" if row["outcome"] == "filtered" else row["outcome"]
        is_counted = outcome in {"in flight", "dead"}
        found[sequence] = f"{outcome} {row['attempts']}" if is_counted else outcome
    return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_random_history_folds_to_the_state_that_the_broker_has(kind: str, seed: int) -> None:
    history, fold = History(random.Random(seed), KINDS[kind]), Fold()
    seen = 0
    for number in range(300):
        history.go_on()
        if number % 30 == 29:
            group = history.group
            fold.feed(group.actions[seen:])
            seen = len(group.actions)
            assert folded(fold) == group.outcomes()
            known = GroupMark.from_json(json.loads(json.dumps(fold.mark.to_json())))
            fold = Fold(known, fold.rows())
