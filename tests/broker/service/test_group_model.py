"""Delivery against a model that keeps every message by itself: any order of pulls, outcomes, time
and restarts gives each message the state that the rules say."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qmq_client.wire.requests import Extend, Nack, Reject, Settlement
from tests.broker.service.rig import GROUP, SUBJECT, Given, Rig

MAX_ATTEMPTS = 3
LEASE_MS = 1_000
BACKOFF_MS = {1: 1_000, 2: 2_000}
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


class DeliveryMachine(RuleBasedStateMachine):
    """Drives a broker and the model side by side."""

    @initialize()
    def open(self) -> None:
        self.directory = Path(
            tempfile.mkdtemp(prefix="qmq-model-", dir=MEMORY if MEMORY.is_dir() else None)
        )
        self.rig = Rig(self.directory / "data")
        self.known: list[Known] = []
        self.given: list[tuple[str, Given]] = []
        self.acked: set[tuple[str, int, int]] = set()

    def teardown(self) -> None:
        self.rig.close()
        shutil.rmtree(self.directory)

    @rule(count=st.integers(1, 6))
    def send(self, count: int) -> None:
        self.rig.send(*[b"m"] * count)
        self.known += [Known() for _ in range(count)]

    @rule(consumer=st.sampled_from(CONSUMERS), count=st.integers(1, 8))
    def pull(self, consumer: str, count: int) -> None:
        now_ms = self.rig.now_ms
        self.end_leases(now_ms)
        due = {n for n, m in enumerate(self.known) if m.state == "waiting" and m.at_ms <= now_ms}
        new = [n for n, m in enumerate(self.known) if m.state == "new"]
        given = self.rig.pull(
            consumer, max_messages=count, max_attempts=MAX_ATTEMPTS, lease_ms=LEASE_MS
        )
        assert len(given.sequences) == min(count, len(due) + len(new))
        again = [n for n in given.sequences if self.known[n].attempts]
        assert given.sequences[: len(again)] == again, "redeliveries stand first"
        assert set(again) <= due
        assert len(again) >= min(len(due), count - -(-count // 4)), "new ones get a quarter"
        assert given.sequences[len(again) :] == new[: len(given.sequences) - len(again)]
        for index, (number, attempt) in enumerate(
            zip(given.sequences, given.attempts, strict=True)
        ):
            message = self.known[number]
            message.state, message.attempts = "leased", message.attempts + 1
            message.consumer, message.handle = consumer, (given.token, given.first + index)
            message.at_ms = now_ms + LEASE_MS
            assert attempt == message.attempts
        if given.sequences:
            self.given.append((consumer, given))

    @precondition(lambda self: self.given)
    @rule(
        data=st.data(),
        kind=st.sampled_from(["ack", "ack", "nack", "nack at once", "reject", "extend"]),
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
            message.at_ms = now_ms + 3_000
        elif kind == "reject":
            message.state = "dead"
        else:
            self.give_back(message, 0 if kind == "nack at once" else None)
        return True

    def end_leases(self, now_ms: int) -> None:
        for message in self.known:
            if message.state == "leased" and message.at_ms <= now_ms:
                self.give_back(message, None)

    def give_back(self, message: Known, delay_ms: int | None) -> None:
        if message.attempts >= MAX_ATTEMPTS:
            message.state = "dead"
            return
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
                assert (message.at_ms, message.attempts) == (run.retry_at_ms, run.attempts)
        found |= dict.fromkeys(state.dead, "dead")
        assert found == {n: m.state for n, m in enumerate(self.known) if m.state != "new"}
        assert state.in_flight == sum(m.state == "leased" for m in self.known)
        assert state.waiting == sum(m.state == "waiting" for m in self.known)


TestDeliveryModel = DeliveryMachine.TestCase
TestDeliveryModel.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
