"""Bad histories about what was sent, stored, delivered and effected: LOST to EFFECT."""

from __future__ import annotations

from typing import Final

from tests.kit.expectations import Group
from tests.kit.verdict import Oracle
from tests.kit_tests.case import LEASE, WINDOW_1, Case
from tests.kit_tests.scenes import GROUPS, ORDERED

BAD_FATES: Final = (
    Case(
        "committed and stored, but one group never got it",
        lambda s: s.sent("m1", "m2").handled("m1").drained(),
        Oracle.LOST,
    ),
    Case(
        "accepted, but gone from the log",
        lambda s: (
            s.attempt("m1", "m2", tx="t1")
            .commit("t1")
            .truth("t1", True)
            .accept("m2")
            .store("m1")
            .handled("m1")
            .drained()
        ),
        Oracle.LOST,
    ),
    Case(
        "an unknown commit that turned out committed was never sent",
        lambda s: (
            s.attempt("m1", tx="t1")
            .unknown("t1")
            .truth("t1", True)
            .sent("m2")
            .handled("m2")
            .drained()
        ),
        Oracle.LOST,
    ),
    Case(
        "the database forgot a commit the application saw",
        lambda s: s.attempt("m1", tx="t1").commit("t1").truth("t1", False).drained(),
        Oracle.LOST,
    ),
    Case(
        "accepted outside a transaction and gone",
        lambda s: s.attempt("m1").accept("m1").drained(),
        Oracle.LOST,
        groups={},
    ),
    Case(
        "a message of a rolled back transaction was delivered",
        lambda s: (
            s.attempt("m1", tx="t1")
            .rollback("t1")
            .truth("t1", False)
            .store("m1")
            .deliver("m1")
            .drained()
        ),
        Oracle.GHOST,
    ),
    Case(
        "a message of an unknown, undone transaction was accepted",
        lambda s: s.attempt("m1", tx="t1").unknown("t1").truth("t1", False).accept("m1").drained(),
        Oracle.GHOST,
    ),
    Case(
        "a rolled back savepoint left an effect",
        lambda s: (
            s.attempt("m1", tx="t1")
            .attempt("m2", tx="t1.s1")
            .rollback("t1.s1")
            .commit("t1")
            .truth("t1", True)
            .store("m1")
            .handled("m1")
            .effect("m2")
            .drained()
        ),
        Oracle.GHOST,
    ),
    Case(
        "the application saw a rollback and the row is there",
        lambda s: (
            s.attempt("m1", tx="t1")
            .rollback("t1")
            .truth("t1", True)
            .store("m1")
            .handled("m1")
            .drained()
        ),
        Oracle.GHOST,
    ),
    Case(
        "a message nobody sent was delivered",
        lambda s: s.sent("m1").handled("m1").deliver("x").drained(),
        Oracle.ALIEN,
    ),
    Case(
        "a group got a subject it does not read",
        lambda s: s.sent("m1").handled("m1").deliver("m1", group="audit").drained(),
        Oracle.ALIEN,
        groups={**GROUPS, "audit": Group(subjects=frozenset({"payments"}), has_effects=False)},
    ),
    Case(
        "accepted on another subject",
        lambda s: s.sent("m1").accept("m1", subject="other").handled("m1").drained(),
        Oracle.ALIEN,
    ),
    Case(
        "other bytes at the handler",
        lambda s: s.sent("m1").deliver("m1", body_hash="flipped").ack("m1").drained(),
        Oracle.ALTERED,
    ),
    Case(
        "other bytes in the log",
        lambda s: (
            s.attempt("m1", tx="t1")
            .commit("t1")
            .truth("t1", True)
            .store("m1", body_hash="flipped")
            .handled("m1")
            .drained()
        ),
        Oracle.ALTERED,
    ),
    Case(
        "stored twice and nobody delivered the second",
        lambda s: s.sent("m1").store("m1").accept("m1").handled("m1").drained(),
        Oracle.DUPLOG,
    ),
    Case(
        "stored twice within the window after a takeover",
        lambda s: s.sent("m1").row("claim", "w", 1).store("m1").handled("m1").drained(),
        Oracle.DUPLOG,
        promises=WINDOW_1,
    ),
    Case(
        "stored twice beyond the window without any reason to send again",
        lambda s: s.sent("m1", "m2", "m3").store("m1").handled("m1", "m2", "m3").drained(),
        Oracle.DUPLOG,
        promises=WINDOW_1,
    ),
    Case(
        "two consumers hold one message",
        lambda s: s.sent("m1").deliver("m1").deliver("m1", to="c2").ack("m1").drained(),
        Oracle.DUPDEL,
    ),
    Case(
        "delivered again after a confirmed ack",
        lambda s: s.sent("m1").handled("m1").wait(60_000).deliver("m1", attempt=2).drained(),
        Oracle.DUPDEL,
        promises=LEASE,
    ),
    Case(
        "one nack, two extras",
        lambda s: (
            s.sent("m1")
            .deliver("m1")
            .nack("m1")
            .deliver("m1", attempt=2)
            .deliver("m1", to="c2", attempt=3)
            .ack("m1", by="c2", attempt=3)
            .drained()
        ),
        Oracle.DUPDEL,
    ),
    Case(
        "a broker crash long after the ack excuses nothing",
        lambda s: (
            s.sent("m1")
            .handled("m1")
            .wait(5_000)
            .crash("broker")
            .heal()
            .deliver("m1", attempt=2)
            .drained()
        ),
        Oracle.DUPDEL,
    ),
    Case(
        "the crash of a consumer that did not hold it excuses nothing",
        lambda s: (
            s.sent("m1")
            .deliver("m1")
            .crash("c9")
            .heal()
            .deliver("m1", to="c2", attempt=2)
            .ack("m1", by="c2", attempt=2)
            .drained()
        ),
        Oracle.DUPDEL,
    ),
    Case(
        "redelivered before the lease was over",
        lambda s: (
            s.sent("m1")
            .deliver("m1")
            .wait(10_000)
            .deliver("m1", to="c2", attempt=2)
            .ack("m1", by="c2", attempt=2)
            .drained()
        ),
        Oracle.DUPDEL,
        promises=LEASE,
    ),
    Case(
        "one message, two effects",
        lambda s: s.sent("m1").handled("m1").effect("m1").drained(),
        Oracle.EFFECT,
    ),
    Case(
        "acknowledged without effect",
        lambda s: s.sent("m1").deliver("m1").ack("m1", has_effect=False).drained(),
        Oracle.EFFECT,
    ),
    Case(
        "two rows counted in one event",
        lambda s: s.sent("m1").deliver("m1").effect("m1", times=2).drained(),
        Oracle.EFFECT,
    ),
    Case(
        "accepted at a sequence that the log lost with its message",
        lambda s: (
            s.attempt("m1", "m2", tx="t1", key="k")
            .commit("t1")
            .truth("t1", True)
            .store("m1")
            .accept("m2", sequence=1)
            .handled("m1")
            .drained()
        ),
        Oracle.LOST,
        groups=ORDERED,
    ),
    Case(
        "committed, keyed and never stored",
        lambda s: (
            s.attempt("m1", tx="t1", key="k")
            .commit("t1")
            .truth("t1", True)
            .sent("m2", key="k")
            .handled("m2")
            .drained()
        ),
        Oracle.LOST,
        groups=ORDERED,
    ),
    Case(
        "an unknown group got a message",
        lambda s: s.sent("m1").handled("m1").deliver("m1", group="nobody").drained(),
        Oracle.ALIEN,
    ),
    Case(
        "stored beyond the window after a claim that failed",
        lambda s: (
            s.sent("m1", "m2", "m3")
            .row("claim", "w", 0)
            .store("m1")
            .handled("m1", "m2", "m3")
            .drained()
        ),
        Oracle.DUPLOG,
        promises=WINDOW_1,
    ),
    Case(
        "stored beyond the window after a release and a fault that repeat nothing",
        lambda s: (
            s.sent("m1", "m2", "m3")
            .row("release", "a", 1)
            .fault("disk_full", "broker")
            .fault("disk_full", "broker", "end")
            .heal()
            .store("m1")
            .handled("m1", "m2", "m3")
            .drained()
        ),
        Oracle.DUPLOG,
        promises=WINDOW_1,
    ),
    Case(
        "one broker crash, two extras",
        lambda s: (
            s.sent("m1")
            .deliver("m1")
            .nack("m1")
            .deliver("m1", to="c2", attempt=2)
            .crash("broker")
            .heal()
            .deliver("m1", to="c3")
            .deliver("m1", to="c4")
            .ack("m1", by="c4")
            .drained()
        ),
        Oracle.DUPDEL,
    ),
    Case(
        "a second consumer after the first one's restart, with nothing in between",
        lambda s: (
            s.crash("c1")
            .sent("m1")
            .deliver("m1")
            .deliver("m1", to="c2", attempt=2)
            .ack("m1", by="c2", attempt=2)
            .drained()
        ),
        Oracle.DUPDEL,
    ),
    Case(
        "a pause shorter than the lease excuses nothing",
        lambda s: (
            s.sent("m1")
            .deliver("m1")
            .fault("pause", "c1")
            .wait(500)
            .fault("pause", "c1", "end")
            .heal()
            .deliver("m1", to="c2", attempt=2)
            .ack("m1", by="c2", attempt=2)
            .drained()
        ),
        Oracle.DUPDEL,
        promises=LEASE,
    ),
    Case(
        "the nack of an earlier holder excuses nothing",
        lambda s: (
            s.sent("m1")
            .deliver("m1")
            .nack("m1")
            .deliver("m1", to="c2", attempt=2)
            .nack("m1")
            .deliver("m1", to="c3", attempt=3)
            .ack("m1", by="c3", attempt=3)
            .drained()
        ),
        Oracle.DUPDEL,
    ),
)
