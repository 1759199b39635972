"""Types of positions in logs and queues, so that bytes and counts are not mixed up.

`Offset` counts bytes from the start of a log; `Sequence` counts entries of one consume queue from
0; `PullSequence` counts the deliveries to one consumer of a group from 0.
"""

from __future__ import annotations

from typing import NewType

Offset = NewType("Offset", int)
Sequence = NewType("Sequence", int)
PullSequence = NewType("PullSequence", int)
