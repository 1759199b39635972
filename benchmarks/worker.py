"""The process of a worker: `python -m benchmarks.worker MODULE:FUNCTION JSON`.

Calls `MODULE.FUNCTION(control, **arguments)`. Every line on standard output is one value
for the parent; standard error is the worker's log.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any


class Control:
    """The worker's end of the line to its parent."""

    def __init__(self) -> None:
        # Whatever prints must not garble the lines, so they get a descriptor of their own.
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(self, value: Any) -> None:
        """Send one value to the parent."""
        self._out.write(json.dumps(value).encode() + b"\n")

    def hear(self) -> Any:
        """The next value from the parent; ends this process when the parent is gone."""
        line = sys.stdin.readline()
        if not line:
            raise SystemExit(0)
        return json.loads(line)

    def when_told(self) -> Callable[[], Any]:
        """A function that returns the next value as soon as the parent sent it, None before.

        Nothing else may be heard until then.
        """
        told: list[Any] = []
        threading.Thread(target=self._listen, args=(told,), daemon=True).start()
        return lambda: told[0] if told else None

    def _listen(self, told: list[Any]) -> None:
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # the parent is gone; the main thread would go on for ever
        told.append(json.loads(line))


def main(function: str, arguments: str) -> None:
    """Run one worker function."""
    module, _, name = function.partition(":")
    work = getattr(importlib.import_module(module), name)
    work(Control(), **json.loads(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
