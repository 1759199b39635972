"""A process that does pieces of work, one after the other, for the process that started it; see
`workers.py`.

::

    in    {"function": "qmq_pipeline.work.ranges.ingest_piece", "arguments": {…}}
    out   {"answer": …}                     or
          {"error": "DamagedRangeError", "text": …}

One line of JSON each. It ends when its input ends, so it is never left behind by its starter. A
piece of work is the name of a function of this package and its arguments; it must be safe to do
twice.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib import import_module
from typing import Any, Final, TextIO

_OURS: Final = "qmq_pipeline."


def do_piece(function: str, arguments: dict[str, Any]) -> Any:
    """The answer of the function with this full name.

    Raises `ValueError` if it is not of this package.
    """
    module, _, name = function.rpartition(".")
    if not module.startswith(_OURS):
        raise ValueError(f"{function} is not of this package")
    return getattr(import_module(module), name)(**arguments)


def serve(pieces: TextIO, answers: TextIO) -> None:
    """Do pieces until no more come."""
    for line in pieces:
        try:
            piece = json.loads(line)
            said = {"answer": do_piece(piece["function"], piece["arguments"])}
        except Exception as error:  # whatever it is: whoever asked for the piece is told
            said = {"error": type(error).__name__, "text": str(error)}
        answers.write(json.dumps(said) + "\n")
        answers.flush()


def main() -> None:
    """Serve the standard streams; anything else that is printed goes to stderr."""
    # Ctrl-C comes to all processes of a terminal: the starter of this one says what it means
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
