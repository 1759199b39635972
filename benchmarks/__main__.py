"""What `dev.py bench` runs; how it is called says `options.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from rich.console import Console

from benchmarks import interruption
from benchmarks.machine import ROOT, NoDiskError, adopt_orphans, find_directory
from benchmarks.measure import Effort
from benchmarks.options import parse
from benchmarks.page import write_pages
from benchmarks.report import encode_report, show_list, show_result
from benchmarks.result import Report
from benchmarks.suite import BENCHMARKS, Asked, UnknownBenchmarkError, run_benchmark, select

PAGES: Final = ROOT / "docs" / "benchmarks"


def main(arguments: Sequence[str]) -> int:
    """Run the command; 1 when a benchmark failed, 2 for a wrong call, 130 after Ctrl-C.

    A goal that is not met is a figure, not a failure.
    """
    options = parse(arguments)
    # rich guesses 80 columns where there is no terminal, which breaks every figure in two
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.list:
        show_list(console, BENCHMARKS)
        return 0
    try:
        benchmarks = select(options.names)
        directory = find_directory(options.directory)
    except (UnknownBenchmarkError, NoDiskError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    interruption.listen()
    effort = Effort.QUICK if options.quick else Effort(options.effort)
    asked = Asked(rounds=options.rounds, scale=options.scale, systems=options.systems)
    results = []
    try:
        for benchmark in benchmarks:
            interruption.check()
            with console.status(f"{benchmark.number} {benchmark.name}: {benchmark.summary}"):
                result = run_benchmark(
                    benchmark,
                    effort=effort,
                    directory=directory,
                    is_full_size=options.full_size,
                    asked=asked,
                )
            show_result(console, result)
            results.append(result)
    except KeyboardInterrupt:
        print("bench: interrupted; all processes of it were ended", file=sys.stderr)
        return 130
    report = Report(results=tuple(results))
    if options.json is not None:
        options.json.write_bytes(encode_report(report))
    if pages := options.pages or (PAGES if effort is Effort.FULL else None):
        page = write_pages(report, pages)
        console.print(f"Written: {page}")
    return 1 if any(result.failure for result in results) else 0


if __name__ == "__main__":
    adopt_orphans()
    sys.exit(main(sys.argv[1:]))
