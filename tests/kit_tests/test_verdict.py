"""What a verdict says beside right and wrong: figures, parts of a loss, bounds, JSON."""

from __future__ import annotations

import json

import msgspec
import pytest

from tests.kit.checker import check
from tests.kit.events import AckUnknown, AnyEvent, Fault, LeaseExpired, Nacked
from tests.kit.expectations import Promises
from tests.kit.verdict import EVIDENCE_MAX, FINDINGS_MAX, PROMISES_OF, Oracle
from tests.kit_tests.case import Case
from tests.kit_tests.good_fates import GOOD_FATES
from tests.kit_tests.good_runs import GOOD_RUNS
from tests.kit_tests.scenes import GROUP, GROUPS, Scene

GOOD = (*GOOD_FATES, *GOOD_RUNS)
EXCUSED = [case for case in GOOD if case.sentence.startswith("DUPDEL")]


def test_the_figures_of_a_run() -> None:
    scene = Scene().sent("m1", "m2").attempt("m3", tx="t3").rollback("t3").truth("t3", False)
    scene.attempt("m4", tx="t4").unknown("t4").truth("t4", True).store("m4")
    scene.deliver("m1").nack("m1").deliver("m1", attempt=2).ack("m1", attempt=2)
    scene.handled("m2", "m4").crash("broker").error().heal().drained()
    verdict = check(scene.events, groups=GROUPS)
    assert verdict.ok
    assert verdict.counts == {
        "events": len(scene.events),
        "attempted": 4,
        "committed": 3,
        "rolled_back": 1,
        "unknown_transactions": 1,
        "accepted": 2,
        "stored": 3,
        "delivered": {GROUP: 3},
        "redelivered": 1,
        "excused": {"nack": 1},
        "acked": 3,
        "effects": {GROUP: 3},
        "dead_letters": 0,
        "owner_writes_refused": 0,
        "faults": {"crash": 1},
        "errors": 1,
        "torn_lines": 0,
        "lost": 0,
        "ghosts": 0,
        "effects_doubled": 0,
        "recovery_ms_max": 1,
        "drain_ms_max": 1,
    }


def test_a_loss_is_told_apart_by_where_it_happened() -> None:
    ids = [f"m{number}" for number in range(10)]
    scene = Scene().sent(*ids).handled(*ids[2:5], *ids[6:9]).drained()
    verdict = check(scene.events, groups=GROUPS)
    parts = {part: verdict.counts[f"lost_{part}"] for part in ("prefix", "middle", "tail")}
    assert parts == {"prefix": 2, "middle": 1, "tail": 1}
    assert verdict.counts["lost"] == 4


def test_what_the_log_lost_is_counted_once_and_not_in_every_group() -> None:
    scene = Scene().attempt("m1", "m2", tx="t1").commit("t1").truth("t1", True)
    verdict = check(scene.store("m1").handled("m1").drained().events, groups=GROUPS)
    assert verdict.counts["lost"] == 1
    assert verdict.findings[0].sentence.endswith("missing in the log of bookings (tail)")


def test_losing_everything_is_one_lost_prefix() -> None:
    verdict = check(Scene().sent("m1", "m2").drained().events, groups=GROUPS)
    assert verdict.counts["lost_prefix"] == 2


def test_findings_are_capped_and_all_of_them_counted() -> None:
    ids = [f"m{number}" for number in range(FINDINGS_MAX + 30)]
    scene = Scene().sent(*ids).drained()
    for number in range(30):
        scene.deliver("alien", attempt=number + 1)
    scene.drained()
    verdict = check(scene.events, groups=GROUPS)
    assert verdict.totals[Oracle.LOST] == FINDINGS_MAX + 30
    assert sum(finding.oracle is Oracle.LOST for finding in verdict.findings) == FINDINGS_MAX
    assert all(len(finding.evidence) <= EVIDENCE_MAX for finding in verdict.findings)


def test_json_carries_the_sentence_the_promises_and_the_evidence() -> None:
    scene = Scene().sent("m1").handled("m1").effect("m1").drained()
    tree = json.loads(check(scene.events, groups=GROUPS).to_json())
    (finding,) = tree["findings"]
    assert (tree["ok"], tree["totals"]) == (False, {"EFFECT": 1})
    assert finding["oracle"] == "EFFECT"
    assert finding["promises"] == ["C5"]
    assert finding["message_ids"] == ["m1"]
    assert finding["sentence"] == "message m1 has 2 effects in group billing"
    assert [entry["event"]["e"] for entry in finding["evidence"]] == [
        "delivered",
        "effect",
        "effect",
    ]


def test_every_oracle_names_its_promises() -> None:
    assert set(PROMISES_OF) == set(Oracle)


def test_the_order_in_which_events_are_given_does_not_matter() -> None:
    scene = Scene().sent("m1", "m2").handled("m1").effect("m1").drained()
    forwards = check(scene.events, groups=GROUPS)
    backwards = check(scene.events[::-1], groups=GROUPS)
    assert forwards.to_json() == backwards.to_json()


@pytest.mark.parametrize("case", EXCUSED, ids=lambda case: case.sentence)
def test_without_its_excuse_an_extra_delivery_is_unexcused(case: Case) -> None:
    excuses = (Nacked, LeaseExpired, AckUnknown, Fault)
    events = [e for e in case.scene(Scene()).events if not isinstance(e, excuses)]
    verdict = check(events, groups=case.groups, promises=Promises())
    # Where a message is in the log twice, that is one of the excuses that were taken away.
    assert set(verdict.totals) - {Oracle.DUPLOG} == {Oracle.DUPDEL}, str(verdict)


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.sentence)
def test_a_history_judged_after_a_way_through_json_is_judged_the_same(case: Case) -> None:
    events = case.scene(Scene()).events
    decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
    read = [decoder.decode(msgspec.json.encode(event)) for event in events]
    assert read == events
