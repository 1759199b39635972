"""`python3 dev.py bench [NAME …]`: run benchmarks, show their figures, write the page.

A full run puts its results into `docs/benchmarks/` beside those of benchmarks that were not run
this time; a quick one shows them only, because three short rounds are no figure to publish.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks import interruption
from benchmarks.machine import ROOT, NoDiskError, find_directory
from benchmarks.measure import Effort
from benchmarks.page import write_pages
from benchmarks.report import encode_report, show_list, show_result
from benchmarks.result import Report
from benchmarks.suite import BENCHMARKS, UnknownBenchmarkError, run_benchmark, select

PAGES: Final = ROOT / "docs" / "benchmarks"


def main(arguments: Sequence[str]) -> int:
    """Run the command; 1 when a benchmark failed, 2 for a wrong call, 130 after Ctrl-C.

    A goal that is not met is a figure, not a failure.
    """
    options = parser().parse_args(arguments)
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


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(prog="dev.py bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="number, name or group (outbox); all when none"
    )
    parser.add_argument("--list", action="store_true", help="show the benchmarks and stop")
    parser.add_argument("--quick", action="store_true", help="three short rounds, no page")
    parser.add_argument(
        "--effort", choices=[effort.value for effort in Effort], default=Effort.FULL.value
    )
    parser.add_argument(
        "--full-size", action="store_true", help="as much data as the goals speak of; takes long"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, too")
    parser.add_argument("--pages", type=Path, metavar="DIR", help="write the page here")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="measure here; must be on a disk"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
