"""One hand-made history and the oracle that must speak about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from tests.kit.expectations import Group, Promises
from tests.kit.verdict import Oracle
from tests.kit_tests.scenes import GROUPS, Scene


class Case(NamedTuple):
    #: What happened; the test's name.
    sentence: str
    #: Plays it.
    scene: Callable[[Scene], Scene]
    #: The only oracle that speaks; None: the history is good.
    oracle: Oracle | None = None
    groups: Mapping[str, Group] = GROUPS
    promises: Promises = Promises()


WINDOW_1: Final = Promises(dedupe_window_messages=1)
LEASE: Final = Promises(lease_ms=30_000)
ON_TIME: Final = Promises(late_ms_max=200)
