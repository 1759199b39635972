"""The supervisor of the demo, and the services it starts; how it is called says `options.py`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from examples.flights import consumers, departures
from examples.flights.data import data_file
from examples.flights.database import ServerMissingError, open_databases, version_of
from examples.flights.expected import count_by_hand
from examples.flights.judge import judge
from examples.flights.options import parse
from examples.flights.plan import (
    BOARD,
    COUNTER,
    KEEP_SENT_S,
    TALLIES,
    Plan,
    plan_from_environment,
)
from examples.flights.process import ProcessError
from examples.flights.proof import prove
from examples.flights.result import collect, print_result
from examples.flights.run import DEPARTURES, Run, free_port
from examples.flights.screen import Screen


def main(arguments: list[str]) -> int:
    """Run the demo, or, when named first, one of its services."""
    if arguments and arguments[0] in (DEPARTURES, TALLIES, COUNTER):
        _service(arguments[0])
        return 0
    options = parse(arguments)
    signal.signal(signal.SIGTERM, _on_stop)  # unasked, it would leave its processes behind
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        return _demo(options.keep.resolve(), options)
    with tempfile.TemporaryDirectory(prefix="qmq-flights-") as folder:
        return _demo(Path(folder), options)


def _on_stop(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _demo(directory: Path, options: argparse.Namespace) -> int:
    months = tuple(range(1, 13)) if options.all else (options.month,)
    try:
        with open_databases(options.database, directory) as databases:
            plan = Plan(
                directory=str(directory),
                databases=databases,
                port=free_port(),
                months=months,
                days=options.days,
                keep_sent_s=0 if options.no_spark else KEEP_SENT_S,
            )
            return _run(plan, options)
    except ServerMissingError as error:
        print(f"The demo cannot start: {error}", file=sys.stderr)
        return 1


def _run(plan: Plan, options: argparse.Namespace) -> int:
    months = frozenset(plan.months)
    expected = count_by_hand(data_file(), months, plan.days)
    flights = expected.committed + expected.rolled_back
    try:
        with Screen(flights, expected.messages.total()) as screen:
            with Run(plan, flights, screen.show) as run:
                run.go()
                run.stop()
            print("the services have stopped; comparing the run with the file", file=sys.stderr)
            judgement = judge(plan, expected)
    except ProcessError as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    proof = None
    if not options.no_spark:
        print("making the pipeline's tables; this may take minutes", file=sys.stderr)
        proof = prove(plan, is_kept=options.keep is not None)
    result = collect(run, expected, judgement, proof, version_of(plan.databases[BOARD]))
    print_result(result)
    for line in proof.lines() if proof is not None else ():
        Console(soft_wrap=True).print(line, highlight=False)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["ok"] else 1


def _service(name: str) -> None:
    plan = plan_from_environment()
    if name == DEPARTURES:
        departures.main(plan)
    else:
        consumers.main(plan, name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
