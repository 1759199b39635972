"""Positions, each its own type: bytes and counts are never mixed up silently.

`Offset` counts bytes from the start of a log; `Sequence` counts entries of one consume queue from
0; `PullSequence` counts what one consumer of a group was given, from 0.
"""

from __future__ import annotations

from typing import NewType

Offset = NewType("Offset", int)
Sequence = NewType("Sequence", int)
PullSequence = NewType("PullSequence", int)
