"""The demo's last step where there is no Spark, and what it makes of findings."""

from __future__ import annotations

from examples.flights.plan import BOARD, KEEP_SENT_S, Plan
from examples.flights.proof import Proof, database_environment, why_missing

FINDINGS = {"lost": 1, "ghost": 0}


def the_plan(keep_sent_s: int) -> Plan:
    return Plan(
        directory="/x",
        databases={BOARD: "sqlite:///x"},
        port=1,
        months=(1,),
        days=3,
        keep_sent_s=keep_sent_s,
    )


def test_without_spark_the_demo_says_so_in_one_line_and_is_as_right_as_it_was() -> None:
    missing = why_missing(("no_such_module_a", "no_such_module_b"))
    assert missing is not None
    proof = Proof(missing=missing)
    (line,) = proof.lines()
    assert "no_such_module_a, no_such_module_b not installed" in line
    assert "pip install" in line
    assert proof.ok


def test_findings_and_a_pipeline_that_cannot_continue_are_not_right() -> None:
    counts = {"committed": 9, "stored": 8, "delivered": 8, "expected": 9}
    found = Proof(audit={**counts, "findings": FINDINGS})
    assert not found.ok
    assert "1 lost, 0 ghost: [bold red]FINDINGS" in found.lines()[0]
    failed = Proof(failure="the log is damaged at offset 7")
    assert not failed.ok
    assert "offset 7" in failed.lines()[0]


def test_accepted_rows_are_kept_for_an_audit_and_for_nothing_else() -> None:
    assert database_environment(the_plan(KEEP_SENT_S)) == {
        "QMQ_DATABASE_URL": "sqlite:///x",
        "QMQ_DATABASE_KEEP_SENT_S": str(KEEP_SENT_S),
    }
    assert database_environment(the_plan(0)) == {"QMQ_DATABASE_URL": "sqlite:///x"}
