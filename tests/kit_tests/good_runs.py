"""Right histories that tempt ORDER to RECOVERY; a sentence begins with the tempted oracle."""

from __future__ import annotations

from typing import Final

from tests.kit.expectations import NS_PER_MS, Promises
from tests.kit_tests.case import ON_TIME, Case
from tests.kit_tests.scenes import ORDERED, SUBJECT

GOOD_RUNS: Final = (
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
        "ORDER: the previous was given for the last time to nobody, died, and was replayed",
        lambda s: (
            s.sent("m1", "m2", key="k")
            .deliver("m1")
            .crash("c1")
            .heal()
            .wait(1_000)
            .handled("m2")
            .deliver("m1", attempt=2)
            .ack("m1", attempt=2)
            .dead("m1", last_given_ns=500 * NS_PER_MS)
            .drained()
        ),
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
            .deliver("m1", broker_at_ms=5_000)
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
    Case(
        "OFFSET: an answer without a sequence",
        lambda s: (
            s.attempt("m1", tx="t1")
            .commit("t1")
            .truth("t1", True)
            .accept("m1")
            .store("m1")
            .handled("m1")
            .drained()
        ),
    ),
    Case(
        "ORDER: messages without a key, and outside transactions, have no order",
        lambda s: (
            s.attempt("m1", "m2")
            .attempt("m3", tx="t3")
            .commit("t3")
            .attempt("m4", tx="t4")
            .commit("t4")
            .truth("t3", True)
            .truth("t4", True)
            .store("m4", "m3", "m2", "m1")
            .handled("m1", "m2", "m3", "m4")
            .drained()
        ),
        groups=ORDERED,
    ),
    Case(
        "ORDER: two processes sent outside transactions at the same time",
        lambda s: s.attempt("m1", "m2", key="k").store("m2", "m1").handled("m2", "m1").drained(),
        groups=ORDERED,
    ),
    Case(
        "ORDER: a group that did not ask for order on a subject that is stored in order",
        lambda s: s.sent("m1", "m2", key="k").handled("m2", "m1").drained(),
        promises=Promises(ordered_subjects=frozenset({SUBJECT})),
    ),
    Case(
        "EARLY: a broker that does not say when",
        lambda s: (
            s.attempt("m1", tx="t1", due_at_ms=5_000)
            .commit("t1")
            .truth("t1", True)
            .store("m1")
            .handled("m1")
            .drained()
        ),
    ),
    Case(
        "LATE: nobody knows since when it was committed",
        lambda s: (
            s.attempt("m1", tx="t1", due_ns=NS_PER_MS)
            .unknown("t1")
            .truth("t1", True)
            .store("m1")
            .wait(5_000)
            .handled("m1")
            .drained()
        ),
        promises=ON_TIME,
    ),
    Case(
        "LATE: no bound was promised",
        lambda s: (
            s.attempt("m1", tx="t1", due_ns=NS_PER_MS)
            .commit("t1")
            .truth("t1", True)
            .store("m1")
            .wait(5_000)
            .handled("m1")
            .drained()
        ),
    ),
    Case(
        "STUCK: hours after a heal comes the next fault, the drain in between was not noted",
        lambda s: (
            s.crash("broker")
            .heal()
            .sent("m1")
            .handled("m1")
            .wait(900_000)
            .crash("broker")
            .heal()
            .drained()
        ),
    ),
    Case(
        "STUCK: what an earlier life of a process did is past",
        lambda s: s.started().crash("app").started().sent("m1").handled("m1").drained().stopped(),
        promises=Promises(must_stop=frozenset({"app"})),
    ),
    Case(
        "BLAME: the end of a fault that never began is nothing",
        lambda s: s.fault("crash", "broker", "end").sent("m1").handled("m1").drained(),
    ),
)
