"""Delivery against a model that keeps every message by itself: any order of pulls, outcomes, time,
seeks, pauses, replays, snapshots, restarts and kills gives each message the state that the rules say,
in a plain group and in one that is ordered by key."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from qmq_broker.service.limits import ServiceLimits
from qmq_client.group.redelivery import SUSPECT_AFTER
from qmq_client.group.settling import UNTRIED_WAIT_MS
from qmq_client.wire.operations import DeadRequest
from qmq_client.wire.requests import Extend, Nack, Reject, Settlement
from qmq_client.wire.start import parse_start
from tests.broker.service.rig import GROUP, STORE, SUBJECT, Given, Rig

MAX_ATTEMPTS = 3
LEASE_MS = 1_000
BACKOFF_MS = {1: 1_000, 2: 2_000}
#: All dead letters but those used last are in files.
PAGED = ServiceLimits(dead_letters_memory_bytes=1)
#: A start after a kill reads the segments that were open.
SMALL = replace(STORE, segment_bytes=1024 * 1024, action_segment_bytes=256 * 1024)
#: Where syncs cost nothing; what a sync is worth is proven elsewhere.
MEMORY = Path("/dev/shm")
CONSUMERS = ("one", "two", "three")


@dataclass(slots=True)
class Known:
    """One message as the rules see it."""

    state: str = "new"
    attempts: int = 0
    consumer: str = ""
    handle: tuple[int, int] = (0, 0)
    at_ms: int = 0
    key: str | None = None
    #: How often it came back untried since its last attempt.
    untried: int = 0
    #: Whether it may have ended its consumers: its last lease ended in silence, and not its first.
    is_suspect: bool = False
    #: Whether it was given as a suspect, and its consumer has said no word since.
    is_alone: bool = False


class DeliveryMachine(RuleBasedStateMachine):
    """Drives a broker and the model side by side."""

    is_ordered = False

    @initialize()
    def open(self) -> None:
        self.directory = Path(
            tempfile.mkdtemp(prefix="qmq-model-", dir=MEMORY if MEMORY.is_dir() else None)
        )
        self.rig = Rig(self.directory / "data", store_options=SMALL, limits=PAGED)
        self.known: list[Known] = []
        self.given: list[tuple[str, Given]] = []
        self.acked: set[tuple[str, int, int]] = set()
        self.is_paused = False
        #: Replayed messages of an ordered group, in the order in which they came back.
        self.replayed: list[int] = []

    def teardown(self) -> None:
        self.rig.close()
        shutil.rmtree(self.directory)

    @rule(count=st.integers(1, 6))
    def send(self, count: int) -> None:
        for _ in range(count):
            number = len(self.known)
            key = None if number % 4 == 0 else f"key {number % 3}"
            self.rig.send(b"m", key=key)
            self.known.append(Known(key=key))

    @rule(consumer=st.sampled_from(CONSUMERS), count=st.integers(1, 8))
    def pull(self, consumer: str, count: int) -> None:
        now_ms = self.rig.now_ms
        self.end_leases(now_ms)
        due = {n for n, m in enumerate(self.known) if m.state == "waiting" and m.at_ms <= now_ms}
        new = self.to_be_given()
        given = self.rig.pull(
            consumer,
            max_messages=count,
            max_attempts=MAX_ATTEMPTS,
            lease_ms=LEASE_MS,
            ordered=self.is_ordered,
        )
        if self.is_paused:
            assert given.sequences == []
            return
        suspects = {number for number in due if self.known[number].is_suspect}
        if not self.is_turn_of_suspects(consumer, suspects, given.sequences):
            self.check_usual(given.sequences, sorted(due - suspects), new, count)
        for index, (number, attempt) in enumerate(
            zip(given.sequences, given.attempts, strict=True)
        ):
            message = self.known[number]
            message.state, message.attempts = "leased", message.attempts + 1
            if number in self.replayed:
                self.replayed.remove(number)
            message.consumer, message.handle = consumer, (given.token, given.first + index)
            message.at_ms, message.is_alone = now_ms + LEASE_MS, message.is_suspect
            assert attempt == message.attempts
        if given.sequences:
            self.given.append((consumer, given))

    def is_turn_of_suspects(self, consumer: str, suspects: set[int], given: list[int]) -> bool:
        """Whether this pull was answered for a suspect's sake: with it alone, or with nothing."""
        in_hand = [m for m in self.known if m.state == "leased" and m.consumer == consumer]
        if any(message.is_alone for message in in_hand):
            assert given == [], "who has a suspect in hand gets nothing else"
            return True
        if suspects.isdisjoint(given):
            # Nothing, so that its hands become empty; whose hands those are is remembered elsewhere.
            return bool(suspects and in_hand and not given)
        assert len(given) == 1, "a suspect comes alone"
        return True

    def check_usual(self, given: list[int], due: list[int], new: list[int], count: int) -> None:
        """Redeliveries first, and new messages in their order."""
        assert len(given) == min(count, len(due) + len(new))
        again = [number for number in given if number in due]
        assert given[: len(again)] == again, "redeliveries stand first"
        assert len(again) >= min(len(due), count - -(-count // 4)), "new ones get a quarter"
        assert given[len(again) :] == new[: len(given) - len(again)]

    def to_be_given(self) -> list[int]:
        """What was not given yet and may be: in an ordered group the first of each key only."""
        fresh = [n for n, m in enumerate(self.known) if m.state == "new"]
        if not self.is_ordered:
            return fresh
        busy = {m.key for m in self.known if m.state in ("leased", "waiting")} - {None}
        ready: list[int] = []
        for number in [n for n in fresh if n not in self.replayed] + self.replayed:
            key = self.known[number].key
            if key is None or key not in busy:
                ready.append(number)
            if key is not None:
                busy.add(key)
        return sorted(ready)

    @precondition(lambda self: self.given)
    @rule(
        data=st.data(),
        kind=st.sampled_from(
            ["ack", "ack", "nack", "nack at once", "nack not begun", "reject", "extend"]
        ),
    )
    def settle(self, data: st.DataObject, kind: str) -> None:
        consumer, given = data.draw(st.sampled_from(self.given))
        first = data.draw(st.integers(given.first, given.next - 1))
        next_ = data.draw(st.integers(first + 1, given.next + 1))
        asked = (first, next_)
        settlement = {
            "ack": Settlement(token=given.token, acks=(asked,)),
            "nack": Settlement(token=given.token, nacks=(Nack(range=asked),)),
            "nack at once": Settlement(token=given.token, nacks=(Nack(range=asked, delay_ms=0),)),
            "nack not begun": Settlement(
                token=given.token, nacks=(Nack(range=asked, delay_ms=0, was_begun=False),)
            ),
            "reject": Settlement(token=given.token, rejects=(Reject(range=asked),)),
            "extend": Settlement(token=given.token, extends=(Extend(range=asked, lease_ms=3_000),)),
        }[kind]
        answer = self.rig.settle(settlement, consumer)
        self.end_leases(self.rig.now_ms)
        stale: list[int] = []
        for pull_sequence in range(*asked):
            if not self.apply(consumer, (given.token, pull_sequence), kind):
                stale.append(pull_sequence)
        assert [n for _, *part in answer.stale for n in range(*part)] == stale
        assert answer.settled == next_ - first - len(stale)

    def apply(self, consumer: str, handle: tuple[int, int], kind: str) -> bool:
        held = [
            message
            for message in self.known
            if message.state == "leased"
            and message.consumer == consumer
            and message.handle == handle
        ]
        if not held:
            return kind == "ack" and (consumer, *handle) in self.acked
        (message,) = held
        now_ms = self.rig.now_ms
        if kind == "ack":
            message.state = "done"
            self.acked.add((consumer, *handle))
        elif kind == "extend":
            message.at_ms, message.is_alone = now_ms + 3_000, False
        elif kind == "reject":
            message.state = "dead"
        elif kind == "nack not begun":
            self.give_back_untried(message)
        else:
            self.give_back(message, None if kind == "nack" else 0)
        return True

    def end_leases(self, now_ms: int) -> None:
        for message in self.known:
            if message.state == "leased" and message.at_ms <= now_ms:
                self.give_back(message, None)
                message.is_suspect = message.attempts >= SUSPECT_AFTER

    def give_back_untried(self, message: Known) -> None:
        """At once the first time; it is what it was before this delivery."""
        message.state, message.is_alone = "waiting", False
        message.at_ms = self.rig.now_ms + (UNTRIED_WAIT_MS if message.untried else 0)
        message.attempts -= 1
        message.untried += 1

    def give_back(self, message: Known, delay_ms: int | None) -> None:
        message.untried = 0
        if message.attempts >= MAX_ATTEMPTS:
            message.state = "dead"
            return
        message.is_suspect = message.is_alone = False
        wait_ms = BACKOFF_MS[message.attempts] if delay_ms is None else delay_ms
        message.state, message.at_ms = "waiting", self.rig.now_ms + wait_ms

    @rule(ms=st.sampled_from([1, 500, 1_000, 2_500]))
    def time_passes(self, ms: int) -> None:
        self.rig.pass_ms(ms)
        self.end_leases(self.rig.now_ms)

    @rule(ms=st.sampled_from([500, 1_000]))
    def time_passes_between_two_looks_at_the_clock(self, ms: int) -> None:
        self.rig.clock.pass_ms(ms)

    @rule()
    def restart(self) -> None:
        self.rig.restart()
        self.forget_who_is_alone()

    @rule()
    def kill(self) -> None:
        self.rig.kill()
        self.rig.start()
        self.forget_who_is_alone()

    def forget_who_is_alone(self) -> None:
        """Whose hands are kept free is known in memory only."""
        for message in self.known:
            message.is_alone = False

    @rule()
    def note_the_groups_down(self) -> None:
        offset, content = self.rig.broker.delivery.snapshot(self.rig.now_ms)
        self.rig.store.actions.write_snapshot(offset, content())

    @precondition(lambda self: self.is_group_there())
    @rule(is_paused=st.booleans())
    def pause_or_resume(self, is_paused: bool) -> None:
        changed = self.rig.broker.changes.pause(
            SUBJECT, GROUP, self.rig.now_ms, is_paused=is_paused
        )
        assert changed is (is_paused is not self.is_paused)
        self.is_paused = is_paused

    @precondition(lambda self: self.is_group_there())
    @rule(data=st.data())
    def seek(self, data: st.DataObject) -> None:
        sequence = data.draw(st.integers(0, len(self.known) + 1))
        start = parse_start(f"sequence:{sequence}")
        sequence = min(sequence, len(self.known))
        self.end_leases(self.rig.now_ms)
        self.rig.pass_ms(0)
        assert self.rig.broker.changes.seek(SUBJECT, GROUP, start, self.rig.now_ms) == sequence
        for number, message in enumerate(self.known):
            if number >= sequence:
                message.state, message.attempts, message.is_suspect = "new", 0, False
                message.untried = 0
            elif message.state != "dead":
                message.state = "done"
        self.replayed.clear()

    @precondition(lambda self: any(m.state == "dead" for m in self.known))
    @rule(data=st.data(), is_replay=st.booleans())
    def take_dead_letters_up_again_or_forget_them(
        self, data: st.DataObject, is_replay: bool
    ) -> None:
        first = data.draw(st.integers(0, len(self.known)))
        next_ = data.draw(st.integers(first, len(self.known)))
        request = DeadRequest(subject=SUBJECT, group=GROUP, first=first, next=next_)
        changes = self.rig.broker.changes
        dead = [n for n in range(first, next_) if self.known[n].state == "dead"]
        answer = (changes.replay if is_replay else changes.purge)(request, self.rig.now_ms)
        assert (answer.count, answer.gone, answer.has_more) == (len(dead), 0, False)
        for number in dead:
            message = self.known[number]
            message.attempts, message.untried, message.is_suspect = 0, 0, False
            if not is_replay:
                message.state = "done"
            elif self.is_ordered:
                message.state = "new"
                self.replayed.append(number)
            else:
                message.state, message.at_ms = "waiting", self.rig.now_ms

    def is_group_there(self) -> bool:
        return self.rig.broker.delivery.group(SUBJECT, GROUP) is not None

    @invariant()
    def every_message_is_where_the_model_has_it(self) -> None:
        if not hasattr(self, "rig"):
            return
        state = self.rig.broker.delivery.group(SUBJECT, GROUP)
        if state is None:
            return
        found = dict.fromkeys(range(state.cursor), "done")
        for name, log in state.consumers():
            for lease in log.leases():
                for index in range(lease.next - lease.first):
                    number = lease.first_sequence + index
                    found[number] = "leased"
                    message = self.known[number]
                    assert (message.consumer, message.handle, message.at_ms) == (
                        name,
                        (lease.token, lease.first + index),
                        lease.until_ms,
                    )
        for run in state.redeliveries.runs():
            for number in range(run.first, run.next):
                found[number] = "waiting"
                message = self.known[number]
                assert (message.at_ms, message.attempts, message.untried) == (
                    run.retry_at_ms,
                    run.attempts,
                    run.untried,
                )
        found |= dict.fromkeys(state.dead, "dead")
        for number, _ in () if state.by_key is None else state.by_key.sequences():
            if found[number] == "done":
                found[number] = "new"
        expected = {n: m.state for n, m in enumerate(self.known) if n in found or m.state != "new"}
        assert found == expected
        assert state.held == list(found.values()).count("new")
        assert state.is_paused is self.is_paused
        assert state.in_flight == sum(m.state == "leased" for m in self.known)
        assert state.waiting == sum(m.state == "waiting" for m in self.known)


class OrderedMachine(DeliveryMachine):
    """The same for a group that gets messages of one key one after the other."""

    is_ordered = True


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("machine", [DeliveryMachine, OrderedMachine])
def test_the_model_holds_over_many_more_lives(
    request: pytest.FixtureRequest, machine: type[DeliveryMachine]
) -> None:
    if not request.config.getoption("--release"):
        pytest.skip("only before a release")
    lives = settings(TestDeliveryModel.settings, max_examples=2_000, stateful_step_count=60)
    run_state_machine_as_test(machine, settings=lives)


TestDeliveryModel = DeliveryMachine.TestCase
TestOrderedModel = OrderedMachine.TestCase
TestDeliveryModel.settings = TestOrderedModel.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
