"""Random right histories are clean; with one violation planted at random, its oracle speaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.kit.checker import check
from tests.kit.events import (
    Acked,
    AnyEvent,
    Attempt,
    DeadLetter,
    Delivered,
    Drained,
    Effect,
    Event,
    Fault,
    Heal,
    Rollback,
    Stored,
    Truth,
    Unknown,
)
from tests.kit.expectations import NS_PER_MS, NS_PER_S, Promises
from tests.kit.verdict import Oracle
from tests.kit_tests.scenes import GROUP, ORDERED, Scene

PROMISES: Final = Promises(late_ms_max=200)
#: A second after everything, and after the grace of every fault.
LONG_AFTER_MS: Final = 60_000

E = TypeVar("E", bound=Event)
Draw = Callable[[st.SearchStrategy[int]], int]
Plant = Callable[[Scene, "Chooser"], None]


class Chooser:
    """Draws choices from Hypothesis, so that a failing example shrinks."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def below(self, bound: int) -> int:
        return self._draw(st.integers(0, bound - 1))

    def of(self, options: list[E]) -> E:
        assume(options)
        return options[self.below(len(options))]

    def word(self, *options: str) -> str:
        return options[self.below(len(options))]


@st.composite
def right_histories(draw: Callable[[st.SearchStrategy[int]], int]) -> tuple[Scene, Chooser]:
    """A run of a right system: some transactions, every kind of legal trouble, then the end."""
    choose, scene = Chooser(draw), Scene()
    for number in range(1 + choose.below(6)):
        _transaction(scene, choose, f"t{number}")
    scene.heal().drained().stopped()
    return scene, choose


def _transaction(scene: Scene, choose: Chooser, tx: str) -> None:
    ids = [f"{tx}-m{number}" for number in range(1 + choose.below(3))]
    scene.attempt(*ids, tx=tx, key=choose.word("", "k1", "k2"))
    outcome = choose.word("commit", "commit", "commit", "rollback", "unknown yes", "unknown no")
    is_committed = outcome in ("commit", "unknown yes")
    if outcome == "commit":
        scene.commit(tx)
    elif outcome == "rollback":
        scene.rollback(tx)
    else:
        scene.unknown(tx)
    scene.truth(tx, is_committed)
    if is_committed:
        scene.store(*ids)
        for message_id in ids:
            _publish(scene, choose, message_id)
            _consume(scene, choose, message_id)


def _publish(scene: Scene, choose: Chooser, message_id: str) -> None:
    how = choose.word("owner", "takeover", "answer lost")
    if how == "takeover":
        scene.row("claim", "watchdog", 1, message_id).accept(message_id)
        scene.row("remove", "watchdog", 1, message_id).row("remove", "app", 0, message_id)
    elif how == "owner":
        scene.accept(message_id).row("remove", "app", 1, message_id)


def _consume(scene: Scene, choose: Chooser, message_id: str) -> None:
    attempt = 1
    scene.deliver(message_id)
    for _ in range(choose.below(3)):
        trouble = choose.word("nack", "lease", "ack lost", "consumer", "broker")
        if trouble == "nack":
            scene.nack(message_id, attempt=attempt)
        elif trouble == "lease":
            scene.lease_end(message_id, attempt=attempt)
        elif trouble == "ack lost":
            scene.ack_unknown(message_id, attempt=attempt)
        elif trouble == "consumer":
            scene.crash("c1").error("pull")
        else:
            scene.fault("crash", "broker").error().fault("crash", "broker", "end")
        attempt += 1
        scene.deliver(message_id, attempt=attempt)
    if choose.below(8):
        scene.ack(message_id, attempt=attempt)
    else:
        scene.dead(message_id)


def _all(scene: Scene, kind: type[E]) -> list[E]:
    return [event for event in scene.events if isinstance(event, kind)]


def _replace(scene: Scene, old: Event, **changes: object) -> None:
    i = next(i for i, event in enumerate(scene.events) if event is old)
    scene.events[i] = msgspec.structs.replace(scene.events[i], **changes)


def _remove(scene: Scene, is_unwanted: Callable[[AnyEvent], bool]) -> None:
    scene.events = [event for event in scene.events if not is_unwanted(event)]


def _durable_acks(scene: Scene) -> list[Acked]:
    """Acks that no broker crash can have undone."""
    window_ns = PROMISES.ack_durable_ms * NS_PER_MS
    crashes = [f.at_ns for f in _all(scene, Fault) if f.target == "broker"]
    return [
        ack
        for ack in _all(scene, Acked)
        if not any(ack.began_ns <= at_ns <= ack.at_ns + window_ns for at_ns in crashes)
    ]


def lost(scene: Scene, choose: Chooser) -> None:
    message_id = choose.of(_all(scene, Stored)).message_id
    kinds = (Delivered, Acked, Effect, DeadLetter)
    _remove(scene, lambda event: isinstance(event, kinds) and event.message_id == message_id)


def ghost(scene: Scene, choose: Chooser) -> None:
    undone = {event.transaction_id for event in _all(scene, Truth) if not event.is_committed}
    attempts = [a for a in _all(scene, Attempt) if a.transaction_id in undone]
    message_id = choose.of(attempts).message_id
    place = choose.word("accept", "store", "deliver", "effect")
    getattr(scene, place)(message_id)


def ghost_in_the_table(scene: Scene, choose: Chooser) -> None:
    transaction_id = choose.of(_all(scene, Rollback)).transaction_id
    truth = next(t for t in _all(scene, Truth) if t.transaction_id == transaction_id)
    _replace(scene, truth, is_committed=True)


def alien(scene: Scene, choose: Chooser) -> None:
    getattr(scene, choose.word("accept", "store", "deliver", "effect"))("x")


def altered(scene: Scene, choose: Chooser) -> None:
    seen = [*_all(scene, Stored), *_all(scene, Delivered)]
    assume(seen)
    _replace(scene, seen[choose.below(len(seen))], body_hash="flipped")


def stored_twice(scene: Scene, choose: Chooser) -> None:
    scene.store(choose.of(_all(scene, Stored)).message_id)


def delivered_after_ack(scene: Scene, choose: Chooser) -> None:
    scene.wait(LONG_AFTER_MS).deliver(
        choose.of(_durable_acks(scene)).message_id, to="c2", attempt=9
    )


def held_by_two(scene: Scene, choose: Chooser) -> None:
    first = choose.of(_all(scene, Delivered))
    twin = msgspec.structs.replace(first, at_ns=first.at_ns + 1, consumer="c2")
    scene.events.append(twin)


def effect_twice(scene: Scene, choose: Chooser) -> None:
    scene.effect(choose.of(_all(scene, Effect)).message_id)


def effect_missing(scene: Scene, choose: Chooser) -> None:
    gone = choose.of(_all(scene, Effect))
    _remove(scene, lambda event: event is gone)


def order(scene: Scene, choose: Chooser) -> None:
    """Two messages of one key, handed out and settled; then the later one came first."""
    first, second = f"p{choose.below(9)}", f"q{choose.below(9)}"
    scene.sent(first, second, key="planted").handled(second, first).drained()


def hole(scene: Scene, choose: Chooser) -> None:
    entries = _all(scene, Stored)
    assume(len(entries) > 1)
    _replace(scene, choose.of(entries), sequence=1_000 + choose.below(1_000))


def one_place_two_messages(scene: Scene, choose: Chooser) -> None:
    entries = _all(scene, Stored)
    assume(len(entries) > 1)
    i = choose.below(len(entries) - 1)
    scene.accept(entries[i].message_id, sequence=entries[i + 1].sequence)


def early(scene: Scene, choose: Chooser) -> None:
    first = choose.of([d for d in _all(scene, Delivered) if d.attempt == 1])
    attempt = next(a for a in _all(scene, Attempt) if a.message_id == first.message_id)
    _replace(scene, attempt, due_ns=first.at_ns + NS_PER_S)


def late(scene: Scene, choose: Chooser) -> None:
    scene.wait(LONG_AFTER_MS)
    scene.attempt("late", tx="late", due_ns=scene.now_ns).commit("late").truth("late", True)
    scene.store("late").wait(300 + choose.below(10_000)).handled("late").drained()


def late_owner(scene: Scene, choose: Chooser) -> None:
    message_id = choose.of(_all(scene, Stored)).message_id
    scene.row("claim", "thief", 1, message_id).row("remove", "app", 1, message_id)


def stale_ack(scene: Scene, choose: Chooser) -> None:
    second = choose.of([d for d in _all(scene, Delivered) if d.attempt > 1])
    stale = Acked(
        at_ns=second.at_ns + 2,
        group=GROUP,
        consumer="c1",
        message_id=second.message_id,
        attempt=second.attempt - 1,
        began_ns=second.at_ns + 1,
    )
    scene.events.append(stale)


def never_drained(scene: Scene, choose: Chooser) -> None:
    _remove(scene, lambda event: isinstance(event, Drained))


def left_over(scene: Scene, choose: Chooser) -> None:
    scene.stopped(threads=choose.below(2), leases=1 + choose.below(9))


def blame(scene: Scene, choose: Chooser) -> None:
    scene.wait(LONG_AFTER_MS).error(choose.word("send", "pull", "settle"))


def slow_recovery(scene: Scene, choose: Chooser) -> None:
    heal = _all(scene, Heal)[-1]
    shift_ns = (PROMISES.recovery_ms_max + 1 + choose.below(10_000)) * NS_PER_MS
    scene.events = [
        msgspec.structs.replace(event, at_ns=event.at_ns + shift_ns)
        if event.at_ns > heal.at_ns
        else event
        for event in scene.events
    ]


def unsettled(scene: Scene, choose: Chooser) -> None:
    transaction_id = choose.of(_all(scene, Unknown)).transaction_id
    _remove(scene, lambda e: isinstance(e, Truth) and e.transaction_id == transaction_id)


PLANTS: Final[tuple[tuple[Plant, Oracle], ...]] = (
    (lost, Oracle.LOST),
    (ghost, Oracle.GHOST),
    (ghost_in_the_table, Oracle.GHOST),
    (alien, Oracle.ALIEN),
    (altered, Oracle.ALTERED),
    (stored_twice, Oracle.DUPLOG),
    (delivered_after_ack, Oracle.DUPDEL),
    (held_by_two, Oracle.DUPDEL),
    (effect_twice, Oracle.EFFECT),
    (effect_missing, Oracle.EFFECT),
    (order, Oracle.ORDER),
    (hole, Oracle.OFFSET),
    (one_place_two_messages, Oracle.OFFSET),
    (early, Oracle.EARLY),
    (late, Oracle.LATE),
    (late_owner, Oracle.FENCE),
    (stale_ack, Oracle.FENCE),
    (never_drained, Oracle.STUCK),
    (left_over, Oracle.STUCK),
    (blame, Oracle.BLAME),
    (slow_recovery, Oracle.RECOVERY),
    (unsettled, Oracle.HISTORY),
)


@settings(max_examples=200, deadline=None)
@given(right_histories())
def test_a_right_history_is_clean(history: tuple[Scene, Chooser]) -> None:
    verdict = check(history[0].events, groups=ORDERED, promises=PROMISES)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize(("plant", "oracle"), PLANTS, ids=lambda one: getattr(one, "__name__", one))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(history=right_histories())
def test_a_planted_violation_is_found(
    plant: Plant, oracle: Oracle, history: tuple[Scene, Chooser]
) -> None:
    scene, choose = history
    plant(scene, choose)
    verdict = check(scene.events, groups=ORDERED, promises=PROMISES)
    assert oracle in verdict.totals, str(verdict)


def test_every_oracle_has_a_plant() -> None:
    assert {oracle for _, oracle in PLANTS} == set(Oracle)
