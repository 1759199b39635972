"""The `qmq` command: loads only the sub-command that it runs.

Sub-commands are entry points of the group `qmq.commands`. This module prints help and version from
the names of the entry points, without click, so that `qmq --help` takes less than 100 ms. The click
group in `commands/root.py` does everything else. `commands/exit_codes.py` has all exit codes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec

from qmq_client.commands.listing import discard_output, found_commands, help_text


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in {"-h", "--help"}:
        _print(help_text(found_commands()))
        raise SystemExit(0 if given else 2)
    if given[0] == "--version":
        _print(f"qmq {version('qmq')} (codec: {codec()})")
        raise SystemExit(0)
    from qmq_client.commands.root import root

    root(given, prog_name="qmq")


def codec() -> str:
    """What turns messages into bytes and back here, `compiled` or `Python`; it is not imported for that."""
    found = find_spec("qmq_client.wire.record")
    return "Python" if found is None or str(found.origin).endswith(".py") else "compiled"


def _print(text: str) -> None:
    """Print a text; if that fails, exit with the same code as a sub-command."""
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
