"""A process that does pieces of work, one after the other, for the process that started it; see
`workers.py`.

::

    in    {"function": "qmq_pipeline.work.ranges.ingest_piece", "arguments": {…}}
    out   {"outage": {…}}                   any number of times, then
          {"answer": …}                     or
          {"error": "DamagedRangeError", "text": …}

One line of JSON each. An outage of the broker is told to the starter, who tells it once for all. It ends when its input ends, even in the middle of a piece: its starter is
dead then, and so no longer holds the lock of the tables. A piece of work is the name of a function of
this package and its arguments; it must be safe to do twice.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from dataclasses import asdict
from importlib import import_module
from threading import Thread
from typing import Any, Final, TextIO

from qmq_pipeline.places.outage_notices import NOTICES

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

    def say(said: dict[str, Any]) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    with NOTICES.told_to(lambda notice: say({"outage": asdict(notice)})):
        for line in pieces:
            try:
                piece = json.loads(line)
                said = {"answer": do_piece(piece["function"], piece["arguments"])}
            except Exception as error:  # whatever it is: whoever asked for the piece is told
                said = {"error": type(error).__name__, "text": str(error)}
            say(said)


def main() -> None:
    """Serve the standard streams; anything else that is printed goes to stderr."""
    # Ctrl-C comes to all processes of a terminal: the starter of this one says what it means
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_input, daemon=True).start()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        serve(sys.stdin, answers)


def _end_with_input() -> None:
    """End this process as soon as nobody can write to its input any more."""
    ended = select.poll()
    ended.register(sys.stdin.fileno(), 0)  # that is told unasked
    ended.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
