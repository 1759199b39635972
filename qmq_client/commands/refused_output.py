"""What to do when nobody takes a command's standard output: its disk is full, or its reader went away."""

from __future__ import annotations

import contextlib
import io
import os
import sys


def let_go_of_output() -> None:
    """Have the rest of it go nowhere.

    Otherwise the interpreter tries to write it once more when it ends, shows how that fails, and
    since Python 3.12 ends with an exit code of its own.
    """
    with contextlib.suppress(io.UnsupportedOperation):  # a caller's stream, which is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
