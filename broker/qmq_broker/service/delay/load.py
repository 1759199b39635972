"""Loading the near future from the schedule into a wheel, in bounded portions."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from qmq_broker.errors import CorruptionError
from qmq_broker.service.delay.wheel import Key, Rows, Wheel, end_of
from qmq_broker.storage.schedule.columns import Columns
from qmq_broker.storage.schedule.fates import Fate, Fates
from qmq_broker.storage.schedule.schedule import Schedule

_log = logging.getLogger(__name__)
#: The longest bucket: where one begins says how far its due times may reach.
BUCKET_MS_MAX: Final = 3_600_000
#: Messages of one load: some forty megabytes while it runs.
LOAD_MAX: Final = 250_000


def frozen_sequences(schedule: Schedule) -> dict[int, int]:
    """Bucket → the sequence behind its last message, of buckets with pending messages."""
    return {bucket: next_ for bucket, next_, pending in schedule.states() if pending}


def load(
    schedule: Schedule,
    wheel: Wheel,
    frozen: Mapping[int, int],
    *,
    until_ms: int,
    damaged: dict[int, str],
) -> int:
    """Load what is due up to `until_ms`, or as much as there is room for; returns how many.

    Of the messages that `frozen` counts. Buckets that cannot be read are noted in `damaged` and
    passed over, then and later.
    """
    last = end_of(until_ms)
    found = Rows()
    room = min(wheel.room, LOAD_MAX)
    for bucket in sorted(frozen):
        if bucket > until_ms:
            break
        if bucket in damaged or bucket + BUCKET_MS_MAX <= wheel.loaded_until.due_at_ms:
            continue
        try:
            fates = schedule.fates_of(bucket)
            for columns in schedule.columns(bucket, 0, frozen[bucket]) if fates is not None else ():
                found.extend(columns, _wanted(columns, fates, wheel.loaded_until, last))
                if len(found) > 2 * room:
                    found, last = _first(found, room)
        except CorruptionError as error:
            damaged[bucket] = str(error)
            _log.error("delayed messages of a bucket are held: reason=%s", error)
    found.sort()
    if len(found) > room:
        found, last = _first(found, room)
    wheel.load(found, last)
    return len(found)


def _first(found: Rows, room: int) -> tuple[Rows, Key]:
    found.sort()
    return found.part(0, room), found.key(room - 1)


def _wanted(columns: Columns, fates: Fates | None, after: Key, last: Key) -> list[int]:
    """Indexes of what is pending behind `after`, up to `last`."""
    bucket, sequences = columns.bucket, columns.sequences
    # The comparison of one number spares most of the look-ups where a bucket is loaded in parts.
    return [
        index
        for index, due_ms in enumerate(columns.due_at_ms)
        if after.due_at_ms <= due_ms <= last.due_at_ms
        and after < (due_ms, bucket, sequences[index]) <= last
        and fates is not None
        and fates.get(sequences[index]) is Fate.PENDING
    ]
