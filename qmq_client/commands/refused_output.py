"""What to do when nobody reads a command's standard output: its disk is full, or its reader has exited."""

from __future__ import annotations

import contextlib
import io
import os
import sys


def discard_output() -> None:
    """Discard the rest of the output.

    Otherwise the interpreter tries to write it again when it exits, prints that this fails, and
    since Python 3.12 returns an exit code of its own.
    """
    with contextlib.suppress(io.UnsupportedOperation):  # a caller's stream, which is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
