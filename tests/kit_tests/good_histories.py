"""Histories of a right system, legal oddities included. A sentence begins with the tempted oracle."""

from __future__ import annotations

from typing import Final

from tests.kit.expectations import NS_PER_MS, Promises
from tests.kit_tests.case import LEASE, ON_TIME, WINDOW_1, Case
from tests.kit_tests.scenes import ORDERED

GOOD: Final = (
    Case("nothing happened", lambda s: s.drained()),
    Case("messages go through", lambda s: s.sent("m1", "m2").handled("m1", "m2").drained()),
    Case(
        "no group reads, the log has it",
        lambda s: s.sent("m1").drained(),
        groups={},
    ),
    Case(
        "LOST: a parked message and a dead letter are not lost",
        lambda s: (
            s.attempt("m1", "m2", tx="t1")
            .commit("t1")
            .truth("t1", True)
            .park("m1")
            .store("m2")
            .deliver("m2")
            .dead("m2")
            .drained()
        ),
    ),
    Case(
        "LOST, GHOST: an unknown commit turned out committed",
        lambda s: (
            s.attempt("m1", tx="t1")
            .unknown("t1")
            .truth("t1", True)
            .store("m1")
            .handled("m1")
            .drained()
        ),
    ),
    Case(
        "LOST, GHOST: an unknown commit turned out rolled back",
        lambda s: s.attempt("m1", tx="t1").unknown("t1").truth("t1", False).drained(),
    ),
    Case(
        "LOST: killed in mid-transaction, nothing seen, and the table says no",
        lambda s: s.attempt("m1", tx="t1").truth("t1", False).drained(),
    ),
    Case(
        "LOST: the database forgot nothing and the application retried with the same id",
        lambda s: (
            s.attempt("m1", tx="t1")
            .rollback("t1")
            .truth("t1", False)
            .sent("m1")
            .handled("m1")
            .drained()
        ),
    ),
    Case(
        "LOST: a message outside any transaction was refused", lambda s: s.attempt("m1").drained()
    ),
    Case(
        "stored though no acknowledgement arrived",
        lambda s: s.attempt("m1").store("m1").handled("m1").drained(),
    ),
    Case(
        "GHOST: a savepoint is rolled back inside a committed transaction",
        lambda s: (
            s.attempt("m1", tx="t1")
            .attempt("m2", tx="t1.s1")
            .rollback("t1.s1")
            .commit("t1")
            .truth("t1", True)
            .truth("t1.s1", False)
            .store("m1")
            .handled("m1")
            .drained()
        ),
    ),
    Case(
        "DUPLOG: stored again beyond the window after a takeover",
        lambda s: (
            s.sent("m1", "m2", "m3")
            .row("claim", "watchdog", 1)
            .store("m1")
            .handled("m1", "m2", "m3")
            .drained()
        ),
        promises=WINDOW_1,
    ),
    Case(
        "DUPDEL: given back and delivered again",
        lambda s: (
            s.sent("m1")
            .deliver("m1")
            .nack("m1")
            .deliver("m1", to="c2", attempt=2)
            .ack("m1", by="c2", attempt=2)
            .drained()
        ),
    ),
    Case(
        "DUPDEL: a second consumer after the lease end; the first one's late ack is refused",
        lambda s: (
            s.sent("m1")
            .deliver("m1")
            .lease_end("m1")
            .deliver("m1", to="c2", attempt=2)
            .ack("m1", by="c2", attempt=2)
            .drained()
        ),
    ),
    Case(
        "DUPDEL: the lease end is known by its length",
        lambda s: (
            s.sent("m1")
            .deliver("m1")
            .wait(30_000)
            .deliver("m1", to="c2", attempt=2)
            .ack("m1", by="c2", attempt=2)
            .drained()
        ),
        promises=LEASE,
    ),
    Case(
        "DUPDEL: the consumer was killed",
        lambda s: (
            s.sent("m1")
            .deliver("m1")
            .crash("c1")
            .heal()
            .deliver("m1", to="c2", attempt=2)
            .ack("m1", by="c2", attempt=2)
            .drained()
        ),
    ),
    Case(
        "DUPDEL: the answer to the ack was lost",
        lambda s: (
            s.sent("m1")
            .deliver("m1")
            .ack_unknown("m1")
            .effect("m1")
            .deliver("m1", to="c2", attempt=2)
            .ack("m1", by="c2", attempt=2, has_effect=False)
            .drained()
        ),
    ),
    Case(
        "DUPDEL: the broker was killed before the ack was durable",
        lambda s: (
            s.sent("m1")
            .deliver("m1")
            .ack("m1")
            .crash("broker")
            .heal()
            .deliver("m1", attempt=2)
            .ack("m1", attempt=2, has_effect=False)
            .drained()
        ),
    ),
    Case(
        "DUPDEL: a paused consumer saw its delivery only after the next owner's",
        lambda s: (
            s.sent("m1")
            .fault("pause", "c1")
            .deliver("m1", to="c2", attempt=2)
            .ack("m1", by="c2", attempt=2)
            .fault("pause", "c1", "end")
            .deliver("m1")
            .heal()
            .drained()
        ),
    ),
    Case(
        "DUPDEL: killed, then given back: two extras, two excuses",
        lambda s: (
            s.sent("m1")
            .deliver("m1")
            .crash("c1")
            .heal()
            .deliver("m1", to="c2", attempt=2)
            .nack("m1", by="c2", attempt=2)
            .deliver("m1", attempt=3)
            .ack("m1", attempt=3)
            .drained()
        ),
    ),
    Case(
        "EFFECT: the handler committed, its ack never came through, it became a dead letter",
        lambda s: s.sent("m1").deliver("m1").effect("m1").dead("m1").drained(),
    ),
    Case(
        "ORDER: overlapping transactions stand either way round",
        lambda s: (
            s.attempt("m1", tx="t1", key="k")
            .attempt("m2", tx="t2", key="k")
            .commit("t1")
            .commit("t2")
            .truth("t1", True)
            .truth("t2", True)
            .store("m2", "m1")
            .handled("m2", "m1")
            .drained()
        ),
        groups=ORDERED,
    ),
    Case(
        "ORDER: the next of a key after the previous is dead",
        lambda s: s.sent("m1", "m2", key="k").deliver("m1").dead("m1").handled("m2").drained(),
        groups=ORDERED,
    ),
    Case(
        "ORDER: the holder was killed between the ack and its note",
        lambda s: (
            s.sent("m1", "m2", key="k")
            .deliver("m1")
            .effect("m1")
            .crash("c1")
            .heal()
            .handled("m2")
            .drained()
        ),
        groups=ORDERED,
    ),
    Case(
        "ORDER: other keys are not held up",
        lambda s: (
            s.sent("m1", key="k1")
            .sent("m2", key="k2")
            .deliver("m1")
            .handled("m2")
            .ack("m1")
            .drained()
        ),
        groups=ORDERED,
    ),
    Case(
        "OFFSET: retention removed the beginning",
        lambda s: (
            s.attempt("m1", tx="t1")
            .commit("t1")
            .truth("t1", True)
            .store("m1", sequence=7)
            .handled("m1")
            .drained()
        ),
    ),
    Case(
        "EARLY, LATE: due and on time",
        lambda s: (
            s.attempt("m1", tx="t1", due_ns=100 * NS_PER_MS, due_at_ms=5_000)
            .commit("t1")
            .truth("t1", True)
            .store("m1")
            .wait(100)
            .deliver("m1", broker_at_ms=5_001)
            .ack("m1")
            .drained()
        ),
        promises=ON_TIME,
    ),
    Case(
        "LATE: the broker was down when it fell due",
        lambda s: (
            s.attempt("m1", tx="t1", due_ns=100 * NS_PER_MS)
            .commit("t1")
            .truth("t1", True)
            .store("m1")
            .crash("broker", down_ms=2_000)
            .heal()
            .handled("m1")
            .drained()
        ),
        promises=ON_TIME,
    ),
    Case(
        "LATE: committed after its due time",
        lambda s: (
            s.attempt("m1", tx="t1", due_ns=10 * NS_PER_MS)
            .wait(5_000)
            .commit("t1")
            .truth("t1", True)
            .store("m1")
            .handled("m1")
            .drained()
        ),
        promises=ON_TIME,
    ),
    Case(
        "FENCE: a second sender after the lease end; the late owner changes nothing",
        lambda s: (
            s.sent("m1")
            .row("claim", "watchdog", 1)
            .row("remove", "watchdog", 1)
            .row("remove", "app", 0)
            .handled("m1")
            .drained()
        ),
    ),
    Case(
        "FENCE: a release that overlapped the next claim",
        lambda s: (
            s.sent("m1")
            .row("claim", "watchdog", 1)
            .wait(-3)
            .row("release", "app", 1, took_ms=5)
            .row("remove", "watchdog", 1)
            .handled("m1")
            .drained()
        ),
    ),
    Case(
        "FENCE: claimed back and forth",
        lambda s: (
            s.sent("m1")
            .row("claim", "w1", 1)
            .row("release", "w1", 1)
            .row("claim", "w2", 1)
            .row("claim", "w1", 1)
            .row("remove", "w1", 1)
            .handled("m1")
            .drained()
        ),
    ),
    Case(
        "FENCE: the broker forgot the last attempts in a crash",
        lambda s: (
            s.sent("m1")
            .deliver("m1")
            .nack("m1")
            .deliver("m1", to="c2", attempt=2)
            .crash("broker")
            .heal()
            .deliver("m1", to="c3")
            .ack("m1", by="c3")
            .drained()
        ),
    ),
    Case(
        "STUCK: a process stops in order",
        lambda s: s.sent("m1").handled("m1").drained().stopped(),
        promises=Promises(must_stop=frozenset({"app"})),
    ),
    Case(
        "STUCK: the next fault came before the first heal had drained",
        lambda s: (
            s.crash("broker").heal().crash("broker").heal().sent("m1").handled("m1").drained()
        ),
    ),
    Case(
        "BLAME: errors during a fault, soon after it, and over a limit",
        lambda s: (
            s.fault("crash", "broker")
            .error()
            .fault("crash", "broker", "end")
            .wait(500)
            .error()
            .heal()
            .wait(60_000)
            .limit("body", "begin")
            .error("send", "413")
            .limit("body", "end")
            .sent("m1")
            .handled("m1")
            .drained()
        ),
        promises=Promises(recovery_ms_max=120_000),
    ),
    Case(
        "RECOVERY: success at once",
        lambda s: s.crash("broker").heal().sent("m1").handled("m1").drained(),
    ),
)
