"""Processes by their ids, as the kernel of Linux shows them."""

from __future__ import annotations

from pathlib import Path


def is_running(process: int) -> bool:
    """Whether the process exists and has not ended; one that ended and was not waited for does not run."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
