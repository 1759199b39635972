"""`python3 dev.py bench [NAME …]`: run benchmarks, show their figures, write the page.

A full run puts its results into `docs/benchmarks/` beside those of benchmarks that were not run
this time; a quick one shows them only, because three short rounds are no figure to publish.
"""

# Imports the standard library alone: dev.py reads a call with it before anything is installed.
from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import Effort


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a call; a wrong one ends the process with 2, `--help` with 0."""
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
    parser.add_argument("--rounds", type=_count, default=0, metavar="N", help="so many rounds")
    parser.add_argument(
        "--scale",
        type=_scale,
        default=1.0,
        metavar="X",
        help="X times as many messages (peers, handlers)",
    )
    parser.add_argument(
        "--systems",
        type=_names,
        default=(),
        metavar="NAME,…",
        help="these peers only, as kafka,nats",
    )
    parser.add_argument("--json", type=_path, metavar="FILE", help="write the results here, too")
    parser.add_argument("--pages", type=_path, metavar="DIR", help="write the page here")
    parser.add_argument(
        "--directory", type=_path, metavar="DIR", help="measure here; must be on a disk"
    )
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError("1 at least")
    return count


def _scale(text: str) -> float:
    if not 0 < (scale := float(text)) <= 1_000:
        raise argparse.ArgumentTypeError("above 0 and 1,000 at most")
    return scale


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.lower().split(","))


def _path(text: str) -> Path:
    """From where the caller stands; what a benchmark starts stands elsewhere."""
    return Path(text).absolute()
