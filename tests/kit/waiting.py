"""Waiting for what nobody announces: a look now and again, and an end.

Where something can set an event, wait for that event instead: it costs no time and no processor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

#: Ample for a busy machine: a test that is right never waits so long.
DEADLINE_S: Final = 60.0
#: Between two looks; most answers cost a query or a request of their own.
LOOK_S: Final = 0.02


def becomes(
    is_so: Callable[[], object], *, within_s: float = DEADLINE_S, look_s: float = LOOK_S
) -> bool:
    """Whether it comes to be so in time; looks at least once."""
    ends_at_s = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > ends_at_s:
            return False
        time.sleep(look_s)
    return True


def wait_for(
    is_so: Callable[[], object],
    complaint: str | Callable[[], object] = "it did not happen",
    *,
    within_s: float = DEADLINE_S,
    look_s: float = LOOK_S,
) -> None:
    """Return when it is so. Fails with the complaint, which may be made at the end only."""
    if not becomes(is_so, within_s=within_s, look_s=look_s):
        raise AssertionError(complaint() if callable(complaint) else complaint)
