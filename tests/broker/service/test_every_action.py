"""Broken off behind any action, the log still gives groups that lost nothing: what is below the cursor
is held, out, waiting or dead, or there is an action that says why it is done. And a snapshot at any
action, with the actions behind it, gives what all of them give."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qmq_broker.service.delivery.snapshot import (
    GroupImage,
    SnapshotImage,
    encode_groups,
    groups_at_end,
)
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_client.group.actions import Acked, Action, Keyed, MovedBack, Passed, Pulled, Purged, Sought
from qmq_client.group.apply import apply_action, move_back, must_move_back
from qmq_client.group.dead_letters import letters_of
from qmq_client.group.state import GroupState
from qmq_client.wire.operations import DeadRequest
from qmq_client.wire.requests import Tags
from qmq_client.wire.start import parse_start
from tests.broker.delay.delay_rig import DelayRig
from tests.broker.service.rig import GROUP, SUBJECT, Given

STEPS = 60
#: Redeliveries after this are long retries.
#: All dead letters but those used last are in files.
LIMITS = ServiceLimits(redelivery_horizon_ms=2_000, dead_letters_memory_bytes=1)
FAR_MS = 2_500
SMALL = {"segment_bytes": 1024 * 1024, "action_segment_bytes": 256 * 1024}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tags": {"tags": Tags(any=("red",))},
    "ordered": {"ordered": True},
    "ordered with tags": {"ordered": True, "tags": Tags(any=("red",))},
    "at most once": {"at_most_once": True},
}


class Life:
    """A life of one group: everything that writes actions, in any order."""

    def __init__(self, rig: DelayRig, source: random.Random, settings: dict[str, Any]) -> None:
        self.rig = rig
        self.source = source
        self.settings = settings
        self.given: list[Given] = []

    def run(self) -> None:
        weights = {
            self.send: 4,
            self.pull: 8,
            self.settle: 8,
            self.take_up_or_forget: 1,
            self.seek: 1,
            self.pass_time: 3,
        }
        for step in self.source.choices(list(weights), list(weights.values()), k=STEPS):
            step()

    def send(self) -> None:
        for _ in range(self.source.randint(1, 5)):
            self.rig.send(
                b"m",
                key=self.source.choice([None, "a", "b"]),
                tags=self.source.choice([(), ("red",), ("red", "blue"), ("blue",)]),
                expires_at_ms=self.source.choice([None, None, self.rig.now_ms + 2_000]),
            )

    def pull(self) -> None:
        count = self.source.randint(1, 6)
        answer = self.rig.pull(max_messages=count, max_attempts=3, lease_ms=1_000, **self.settings)
        if answer.records:
            self.given.append(answer)

    def settle(self) -> None:
        if self.given:
            one = self.source.choice(self.given)
            part = one.part(self.source.randrange(len(one.records)))
            outcomes = [one.ack(part), one.ack(), one.nack(0), one.nack(), one.reject()]
            outcomes += [one.nack(FAR_MS), one.nack(FAR_MS)]
            self.rig.settle(self.source.choice(outcomes))

    def take_up_or_forget(self) -> None:
        changes = self.rig.broker.changes
        if self.is_there():
            change = self.source.choice([changes.replay, changes.purge])
            change(DeadRequest(subject=SUBJECT, group=GROUP), self.rig.now_ms)

    def seek(self) -> None:
        if self.is_there():
            start = parse_start(f"sequence:{self.source.randrange(20)}")
            self.rig.broker.changes.seek(SUBJECT, GROUP, start, self.rig.now_ms)

    def pass_time(self) -> None:
        self.rig.pass_ms(self.source.choice([1, 500, 1_500]))
        self.rig.broker.long_retries.step(self.rig.now_ms)
        self.rig.release()

    def is_there(self) -> bool:
        return self.rig.broker.delivery.group(SUBJECT, GROUP) is not None


def written(rig: DelayRig) -> list[Action]:
    log = rig.store.actions
    frames = log.between(LogRange(0, log.log.written_offset))
    return [action for _, found in frames for action in found if action.subject == SUBJECT]


def why_done(actions: Sequence[Action]) -> set[int]:
    """Sequences that some action made done, by the plainest bookkeeping."""
    done: set[int] = set()
    pulled: dict[tuple[str, int], int] = {}
    cursor = 0
    for action in actions:
        match action:
            case Pulled():
                given = [
                    n
                    for r in action.runs
                    for n in range(r.first_sequence, r.first_sequence + r.count)
                ]
                for pull_sequence, sequence in enumerate(given, start=action.first_pull_sequence):
                    pulled[action.consumer, pull_sequence] = sequence
                # What lies between those that were never given did not fit the group.
                done |= set(range(cursor, max(given) + 1)) - set(given)
                cursor = max(cursor, max(given) + 1)
            case Acked():
                held = [(action.consumer, n) for n in range(action.first, action.next)]
                done |= {pulled[one] for one in held if one in pulled}
            case Passed():
                done |= set(range(cursor, action.next))
                cursor = max(cursor, action.next)
            case Keyed():
                done |= set(range(cursor, action.next)) - set(action.sequences)
                cursor = action.next
            case Purged():
                done |= set(range(action.first, action.next))
            case Sought():
                done = set(range(action.sequence))
                cursor = action.sequence
                pulled.clear()
    return done


def places(state: GroupState) -> dict[str, set[int]]:
    """Where the group has what it is not done with."""
    leases = [lease for _, log in state.consumers() for lease in log.leases()]
    found = {
        "out": {n for one in leases for n in range(one.first_sequence, one.next_sequence)},
        "waiting": {n for one in state.redeliveries.runs() for n in range(one.first, one.next)},
        "dead": set(state.dead),
        "long retries": {
            n for one in state.long_retries.runs.runs() for n in range(one.first, one.next)
        },
    }
    keyed = set() if state.by_key is None else {one for one, _ in state.by_key.sequences()}
    found["held"] = keyed - found["out"] - found["waiting"] - found["long retries"]
    assert len(found["held"]) == state.held
    return found


def check_counts(state: GroupState) -> None:
    """The memory that was counted, change by change, is that of what is there."""
    assert state._logs_bytes == sum(log.memory_bytes for _, log in state.consumers())
    letters = [msgspec.msgpack.encode(one) for one in state.dead.values()]
    assert state.dead.encoded_bytes == sum(map(len, letters))
    for runs in (state.redeliveries._runs, state.long_retries.runs._runs):
        assert runs.memory_bytes == sum(run.memory_bytes for run in runs)
    for _, log in state.consumers():
        assert log.leases().memory_bytes == sum(lease.memory_bytes for lease in log.leases())


def comparable(states: Sequence[GroupState]) -> list[GroupImage]:
    """All that a snapshot says, without orders that say nothing and signs of life that no log has."""
    for state in states:
        check_counts(state)
    content = encode_groups(states, 0)
    image, pages = msgspec.msgpack.decode(content.groups, type=SnapshotImage), iter(content.pages)
    letters = [
        [one for page in islice(pages, group.pages) for one in letters_of(page.read())]
        for group in image.groups
    ]
    return [
        msgspec.structs.replace(
            group,
            consumers=tuple(
                msgspec.structs.replace(one, last_seen_ms=0) for one in group.consumers
            ),
            keyed=tuple(sorted(group.keyed, key=lambda one: one[1])),
            dead=tuple(dead),
            pages=0,
        )
        for group, dead in zip(image.groups, letters, strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_C1_the_log_broken_off_behind_any_action_has_lost_nothing(
    tmp_path: Path, kind: str, seed: int
) -> None:
    live_and_break_off(tmp_path, kind, seed)


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("kind", KINDS)
def test_C1_nor_has_it_in_many_more_lives(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    if not request.config.getoption("--release"):
        pytest.skip("only before a release")
    for seed in range(4, 1_000):
        live_and_break_off(tmp_path / str(seed), kind, seed)


def live_and_break_off(directory: Path, kind: str, seed: int) -> None:
    """One life, and its log broken off behind each of its actions."""
    rig = DelayRig(directory, limits=LIMITS, **SMALL)
    Life(rig, random.Random(f"{kind} {seed}"), KINDS[kind]).run()
    actions, now_ms = written(rig), rig.now_ms
    whole = comparable(groups_at_end(None, actions, now_ms).groups)
    groups = [one for one in rig.broker.delivery.groups() if one.subject == SUBJECT]
    assert whole == comparable(groups)
    rig.close()
    for count in range(1, len(actions) + 1):
        (state,) = groups_at_end(None, actions[:count], now_ms).groups
        snapshot = encode_groups([state], now_ms)
        move_back(state, 2**62, 2**62)
        found = places(state)
        where = f"behind action {count}: {actions[count - 1]}"
        everywhere = set().union(*found.values())
        assert sum(map(len, found.values())) == len(everywhere), f"in two places {where}"
        missing = set(range(state.cursor)) - everywhere - why_done(actions[:count])
        assert not missing, f"lost {where}"
        assert comparable(groups_at_end(snapshot, actions[count:], now_ms).groups) == whole, where
        move_back_to_each(actions[:count], state.cursor, now_ms)


def move_back_to_each(actions: Sequence[Action], cursor: int, now_ms: int) -> None:
    """A group that was moved back knows nothing beyond that, and a replay says the same."""
    for next_sequence in {0, cursor // 2, max(0, cursor - 1)}:
        (state,) = groups_at_end(None, actions, now_ms).groups
        action = MovedBack(now_ms, SUBJECT, GROUP, next_sequence, 0)
        must = must_move_back(state, next_sequence, 0)
        before = comparable([state])
        apply_action(state, action)
        assert must == (comparable([state]) != before)
        assert not must_move_back(state, next_sequence, 0)
        assert state.cursor <= next_sequence
        known = set().union(*places(state).values())
        assert not known or max(known) < next_sequence
        assert not state.long_retries.copies
        snapshot = encode_groups([state], now_ms)
        again = groups_at_end(None, [*actions, action], now_ms).groups
        assert comparable(again) == comparable(groups_at_end(snapshot, [], now_ms).groups)
