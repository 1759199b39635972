"""Bad histories about order, time, ownership and liveness: ORDER to HISTORY."""

from __future__ import annotations

from typing import Final

from tests.kit.expectations import NS_PER_MS, Promises
from tests.kit.verdict import Oracle
from tests.kit_tests.case import ON_TIME, Case
from tests.kit_tests.scenes import ORDERED, SUBJECT

BAD_RUNS: Final = (
    Case(
        "stored against the commit order of its key",
        lambda s: (
            s.attempt("m1", tx="t1", key="k")
            .commit("t1")
            .attempt("m2", tx="t2", key="k")
            .commit("t2")
            .truth("t1", True)
            .truth("t2", True)
            .store("m2", "m1")
            .drained()
        ),
        Oracle.ORDER,
        groups={},
        promises=Promises(ordered_subjects=frozenset({SUBJECT})),
    ),
    Case(
        "stored against the order within one transaction",
        lambda s: (
            s.attempt("m1", "m2", tx="t1", key="k")
            .commit("t1")
            .truth("t1", True)
            .store("m2", "m1")
            .handled("m2", "m1")
            .drained()
        ),
        Oracle.ORDER,
        groups=ORDERED,
    ),
    Case(
        "the next of a key was handed out before the previous was settled",
        lambda s: s.sent("m1", "m2", key="k").deliver("m1", "m2").ack("m1", "m2").drained(),
        Oracle.ORDER,
        groups=ORDERED,
    ),
    Case(
        "the next of a key came first",
        lambda s: s.sent("m1", "m2", key="k").handled("m2", "m1").drained(),
        Oracle.ORDER,
        groups=ORDERED,
    ),
    Case(
        "one sequence, two messages",
        lambda s: s.sent("m1", "m2").accept("m2", sequence=0).handled("m1", "m2").drained(),
        Oracle.OFFSET,
    ),
    Case(
        "a hole in the sequences",
        lambda s: (
            s.sent("m1")
            .attempt("m2", tx="t2")
            .commit("t2")
            .truth("t2", True)
            .store("m2", sequence=5)
            .handled("m1", "m2")
            .drained()
        ),
        Oracle.OFFSET,
    ),
    Case(
        "delivered from beyond the durable end",
        lambda s: s.sent("m1").deliver("m1", sequence=9).ack("m1").drained(),
        Oracle.OFFSET,
    ),
    Case(
        "sequences against the append order",
        lambda s: (
            s.attempt("m1", "m2", tx="t1")
            .commit("t1")
            .truth("t1", True)
            .store("m1", sequence=1)
            .store("m2", sequence=0)
            .handled("m1", "m2")
            .drained()
        ),
        Oracle.OFFSET,
    ),
    Case(
        "early by the monotonic clock",
        lambda s: (
            s.attempt("m1", tx="t1", due_ns=1_000 * NS_PER_MS)
            .commit("t1")
            .truth("t1", True)
            .store("m1")
            .handled("m1")
            .drained()
        ),
        Oracle.EARLY,
    ),
    Case(
        "early by one tick of the broker's clock",
        lambda s: (
            s.attempt("m1", tx="t1", due_at_ms=5_000)
            .commit("t1")
            .truth("t1", True)
            .store("m1")
            .deliver("m1", broker_at_ms=4_999)
            .ack("m1")
            .drained()
        ),
        Oracle.EARLY,
    ),
    Case(
        "late without a fault",
        lambda s: (
            s.attempt("m1", tx="t1", due_ns=10 * NS_PER_MS)
            .commit("t1")
            .truth("t1", True)
            .store("m1")
            .wait(1_000)
            .handled("m1")
            .drained()
        ),
        Oracle.LATE,
        promises=ON_TIME,
    ),
    Case(
        "late long after the fault",
        lambda s: (
            s.crash("broker")
            .heal()
            .drained()
            .wait(20_000)
            .attempt("m1", tx="t1", due_ns=20_200 * NS_PER_MS)
            .commit("t1")
            .truth("t1", True)
            .store("m1")
            .wait(1_000)
            .handled("m1")
            .drained()
        ),
        Oracle.LATE,
        promises=ON_TIME,
    ),
    Case(
        "a late owner removed the row",
        lambda s: (
            s.sent("m1").row("claim", "watchdog", 1).row("remove", "app", 1).handled("m1").drained()
        ),
        Oracle.FENCE,
    ),
    Case(
        "a row was removed twice",
        lambda s: s.sent("m1").row("remove", "a", 1).row("remove", "a", 1).handled("m1").drained(),
        Oracle.FENCE,
    ),
    Case(
        "one statement removed the rows of others",
        lambda s: s.sent("m1").row("remove", "a", 3).handled("m1").drained(),
        Oracle.FENCE,
    ),
    Case(
        "a stale ack was taken",
        lambda s: (
            s.sent("m1")
            .deliver("m1")
            .lease_end("m1")
            .deliver("m1", to="c2", attempt=2)
            .ack("m1")
            .drained()
        ),
        Oracle.FENCE,
    ),
    Case("never drained", lambda s: s.sent("m1").handled("m1"), Oracle.STUCK),
    Case(
        "drained once, but not after the last heal",
        lambda s: s.sent("m1").handled("m1").drained().crash("broker").heal(),
        Oracle.STUCK,
    ),
    Case(
        "drained too late after the heal",
        lambda s: s.crash("broker").heal().sent("m1").handled("m1").wait(500_000).drained(),
        Oracle.STUCK,
    ),
    Case(
        "threads and leases left behind",
        lambda s: s.sent("m1").handled("m1").drained().stopped(threads=1, leases=2),
        Oracle.STUCK,
    ),
    Case(
        "a process did not stop",
        lambda s: s.sent("m1").handled("m1").drained(),
        Oracle.STUCK,
        promises=Promises(must_stop=frozenset({"app"})),
    ),
    Case(
        "an error without a fault",
        lambda s: s.sent("m1").error().handled("m1").drained(),
        Oracle.BLAME,
    ),
    Case(
        "an error long after the fault ended",
        lambda s: s.crash("broker").heal().wait(11_000).sent("m1").error().handled("m1").drained(),
        Oracle.BLAME,
    ),
    Case(
        "an error before the limit was reached",
        lambda s: s.error().limit("body", "begin").limit("body", "end").drained(),
        Oracle.BLAME,
    ),
    Case(
        "the first success came late",
        lambda s: s.crash("broker").heal().wait(40_000).sent("m1").handled("m1").drained(),
        Oracle.RECOVERY,
    ),
    Case(
        "even an empty system took long to say that it runs",
        lambda s: s.crash("broker").heal().wait(40_000).drained(),
        Oracle.RECOVERY,
    ),
    Case(
        "an unknown commit was never settled",
        lambda s: s.attempt("m1", tx="t1").unknown("t1").drained(),
        Oracle.HISTORY,
    ),
    Case(
        "a transaction without any outcome",
        lambda s: s.attempt("m1", tx="t1").sent("m2").handled("m2").drained(),
        Oracle.HISTORY,
    ),
    Case(
        "a claim was lost to another and the row changed all the same",
        lambda s: (
            s.sent("m1")
            .row("claim", "app", 1)
            .row("claim", "watchdog", 1)
            .row("remove", "app", 1)
            .handled("m1")
            .drained()
        ),
        Oracle.FENCE,
    ),
    Case(
        "a late owner changed the row before it claimed it back",
        lambda s: (
            s.sent("m1")
            .row("claim", "watchdog", 1)
            .row("release", "app", 1)
            .row("claim", "app", 1)
            .handled("m1")
            .drained()
        ),
        Oracle.FENCE,
    ),
    Case(
        "drained too late after the first of two heals",
        lambda s: (
            s.crash("broker")
            .heal()
            .sent("m1")
            .handled("m1")
            .wait(500_000)
            .drained()
            .crash("broker")
            .heal()
            .drained()
        ),
        Oracle.STUCK,
    ),
    Case(
        "drained too late after the first heal, in the midst of healthy rounds",
        lambda s: s.heal().sent("m1").handled("m1").wait(500_000).drained().heal().drained(),
        Oracle.STUCK,
    ),
    Case(
        "a process came back and did not stop",
        lambda s: s.sent("m1").handled("m1").drained().stopped().started(),
        Oracle.STUCK,
        promises=Promises(must_stop=frozenset({"app"})),
    ),
    Case(
        "an error long after the heal that ended a fault nobody saw end",
        lambda s: (
            s.fault("partition", "app")
            .heal()
            .sent("m1")
            .handled("m1")
            .drained()
            .wait(11_000)
            .error()
        ),
        Oracle.BLAME,
    ),
)
