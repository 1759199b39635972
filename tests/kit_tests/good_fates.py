"""Right histories that tempt LOST to EFFECT; a sentence begins with the tempted oracle."""

from __future__ import annotations

from typing import Final

from tests.kit_tests.case import LEASE, WINDOW_1, Case

GOOD_FATES: Final = (
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
        "DUPDEL: one of two entries was given back, and the other acked before it came again",
        lambda s: (
            s.sent("m1", "m2", "m3")
            .row("claim", "watchdog", 1)
            .store("m1")
            .handled("m2", "m3")
            .deliver("m1", sequence=0)
            .nack("m1")
            .deliver("m1", sequence=3)
            .ack("m1")
            .deliver("m1", sequence=0, attempt=2)
            .ack("m1", attempt=2, has_effect=False)
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
        "LOST: expired before any delivery, kept as a dead letter",
        lambda s: s.sent("m1").dead("m1").drained(),
    ),
    Case(
        "ALTERED: a hash nobody read is not compared",
        lambda s: (
            s.attempt("m1", tx="t1")
            .commit("t1")
            .truth("t1", True)
            .store("m1", body_hash="")
            .handled("m1")
            .drained()
        ),
    ),
    Case(
        "DUPLOG: beyond the window after a crash, and each entry is delivered once",
        lambda s: (
            s.sent("m1", "m2", "m3")
            .handled("m2", "m3")
            .deliver("m1")
            .ack("m1")
            .crash("app")
            .heal()
            .store("m1")
            .deliver("m1")
            .ack("m1", has_effect=False)
            .drained()
        ),
        promises=WINDOW_1,
    ),
    Case(
        "DUPDEL: what was seen late has no holder to excuse",
        lambda s: (
            s.sent("m1")
            .fault("pause", "c1")
            .deliver("m1", to="c2", attempt=2)
            .nack("m1", by="c2", attempt=2)
            .fault("pause", "c1", "end")
            .deliver("m1")
            .heal()
            .deliver("m1", to="c3", attempt=3)
            .ack("m1", by="c3", attempt=3)
            .drained()
        ),
        promises=LEASE,
    ),
)
