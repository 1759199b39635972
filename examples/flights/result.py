"""The figures of a run: for people as a table, for programs as a dictionary."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.flights.expected import Expected
from examples.flights.judge import Judgement
from examples.flights.plan import COUNTER, TALLIES
from examples.flights.proof import Proof
from examples.flights.run import DEPARTURES, WATCHDOG, Run

_SENT_BY_WATCHDOG = re.compile(r"\bsent=(\d+)")


def collect(
    run: Run, expected: Expected, judgement: Judgement, proof: Proof | None, database: str
) -> dict[str, Any]:
    """Everything that was measured and judged; `proof` is None when it was left out."""
    status = {name: child.status for name, child in run.children.items()}
    counts = judgement.verdict.counts
    messages = expected.messages.total()
    return {
        "ok": judgement.ok and (proof is None or proof.ok),
        "database": database,
        "months": list(run.plan.months),
        "expected": {
            "committed": expected.committed,
            "rolled_back": expected.rolled_back,
            "savepoints_rolled_back": expected.savepoints_rolled_back,
            "messages": dict(expected.messages),
        },
        "lost": counts.get("lost", 0),
        "ghosts": counts.get("ghosts", 0),
        "effects_doubled": counts.get("effects_doubled", 0),
        "tally_differences": len(judgement.differences),
        "board": {"by_hand": judgement.board[0], "counted": judgement.board[1]},
        "sent": messages,
        "stored": judgement.stored,
        "redelivered": {
            name: run.children[name].total("redelivered") for name in (TALLIES, COUNTER)
        },
        "recovered_by_watchdog": _recovered(run),
        "delayed": {
            "by_hand": judgement.delayed[0],
            "counted": judgement.delayed[1],
            "late_p99_ms": run.figures.delayed["late_p99_ms"],
            "pending": run.figures.delayed["pending"],
        },
        "latency": {
            "send_to_accepted": status[DEPARTURES].get("send_to_accepted", {}),
            "send_to_handler": {
                name: status[name].get("send_to_handler", {}) for name in (TALLIES, COUNTER)
            },
        },
        "publisher": status[DEPARTURES].get("publisher", {}),
        "faults": run.figures.faults,
        "audit": proof.audit if proof is not None else {},
        "departures_s": round(run.figures.departures_s, 2),
        "total_s": round(run.figures.total_s, 2),
        "transactions_per_s": round(expected.committed / run.figures.departures_s),
        "messages_per_s": round(messages / run.figures.total_s),
        "verdict": {
            "totals": {str(oracle): n for oracle, n in judgement.verdict.totals.items()},
            "counts": dict(counts),
            "findings": [finding.sentence for finding in judgement.verdict.findings[:10]],
        },
    }


def print_result(result: dict[str, Any]) -> None:
    """Print the table and the verdict."""
    console = Console(soft_wrap=True)  # a sentence is not cut where the terminal is narrow
    table = Table(title="Flights through the outbox", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in _lines(result):
        table.add_row(name, value)
    console.print(table)
    for fault in result["faults"]:
        console.print(
            f"  {fault['fault']} at flight {fault['at_flight']:,}; "
            f"started again after {fault['took_s']} s"
        )
    for sentence in result["verdict"]["findings"]:
        console.print(f"  [red]{sentence}")
    console.print(
        f"lost {result['lost']}, ghosts {result['ghosts']}, "
        f"effects doubled {result['effects_doubled']}, "
        f"tallies that differ from the file {result['tally_differences']}: "
        + ("[bold green]all is right" if result["ok"] else "[bold red]NOT RIGHT")
    )


def _lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    latency = result["latency"]
    handler = latency["send_to_handler"]
    return [
        ("database", result["database"]),
        ("transactions committed", f"{result['board']['counted']:,}"),
        ("transactions rolled back", f"{result['expected']['rolled_back']:,}"),
        ("savepoints rolled back", f"{result['expected']['savepoints_rolled_back']:,}"),
        ("messages sent", f"{result['sent']:,}"),
        ("messages stored by the broker", f"{result['stored']:,}"),
        *[(f"redelivered to {name}", f"{n:,}") for name, n in result["redelivered"].items()],
        ("recovered by the watchdog", f"{result['recovered_by_watchdog']:,}"),
        ("delayed messages that came", f"{result['delayed']['counted']:,}"),
        ("send → accepted", _latency(latency["send_to_accepted"])),
        *[(f"send → handler of {name}", _latency(value)) for name, value in handler.items()],
        ("transactions per second", f"{result['transactions_per_s']:,}"),
        ("messages per second, end to end", f"{result['messages_per_s']:,}"),
        ("whole run", f"{result['total_s']} s"),
    ]


def _latency(figures: dict[str, Any]) -> str:
    if not figures:
        return "–"
    return f"p50 {figures['p50_ms']:,} ms, p99 {figures['p99_ms']:,} ms"


def _recovered(run: Run) -> int:
    """Rows that the watchdog says it sent."""
    text = run.log_of(WATCHDOG)
    return sum(int(sent) for sent in _SENT_BY_WATCHDOG.findall(text))
