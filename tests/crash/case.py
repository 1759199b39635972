"""One case of crash or damage; see `cases.py`."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """One case."""

    told: str
    #: Functions that show it; none where `absent` says why it cannot happen.
    tests: tuple[str, ...] = ()
    absent: str = ""
