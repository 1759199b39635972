"""What a rung is: one way to get what tests need. It holds, or it says why not.

`QMQ_TEST_RUNGS` names the rungs that may be tried, with commas between them, such as
`environment,private`; without it all of them may.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CHOSEN: Final = "QMQ_TEST_RUNGS"


class RungError(Exception):
    """This rung does not hold; the text says why."""


def is_allowed(name: str, environment: Mapping[str, str]) -> bool:
    """Whether this rung may be tried."""
    chosen = environment.get(CHOSEN, "")
    return not chosen or name in chosen.split(",")
