"""The `qmq` command: loads only the sub-command that was asked for.

Sub-commands are entry points of the group `qmq.commands`. Help and version are answered here, from
names alone and without click, so that `qmq --help` stays under 100 ms; everything else is the click
group of `commands/root.py`. The exit codes of all sub-commands are in `commands/exit_codes.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version

from qmq_client.commands.listing import discard_output, found_commands, help_text


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in {"-h", "--help"}:
        _print(help_text(found_commands()))
        raise SystemExit(0 if given else 2)
    if given[0] == "--version":
        _print(f"qmq {version('qmq')}")
        raise SystemExit(0)
    from qmq_client.commands.root import root

    root(given, prog_name="qmq")


def _print(text: str) -> None:
    """Print this; if standard output has no reader, end as the sub-commands do."""
    try:
        print(text, flush=True)
    except OSError as error:
        discard_output()
        if isinstance(error, BrokenPipeError):
            raise SystemExit(1) from None
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(3) from None


if __name__ == "__main__":
    main()
