"""Delayed messages that cannot be read, and why: damaged ones are held, all others are released.

A damaged list hides the messages of its frame, a few thousand at most. The states of a bucket must
be known completely: otherwise messages that were released or cancelled would be released again.
"""

from __future__ import annotations

import logging
from typing import Final

from qmq_broker.errors import CorruptionError

_log = logging.getLogger(__name__)
#: Reasons in one status.
REASONS_MAX: Final = 10


class Damage:
    """Damaged buckets and messages, held until they are checked again; written by the thread that loads."""

    def __init__(self) -> None:
        self._whole: dict[int, str] = {}
        self._parts: dict[int, str] = {}
        self._messages: dict[int, tuple[str, ...]] = {}

    def hold_bucket(self, bucket: int, error: CorruptionError) -> None:
        """Release nothing of this bucket."""
        if bucket not in self._whole:
            _log.error("delayed messages of a bucket are held: reason=%s", error)
        self._whole[bucket] = str(error)

    def hold_part(self, bucket: int, error: CorruptionError) -> None:
        """Hold part of this bucket; only the first damaged part is reported."""
        if bucket not in self._parts:
            _log.error("some delayed messages of a bucket are held: reason=%s", error)
            self._parts[bucket] = str(error)

    def hold_message(self, bucket: int, name: str, error: CorruptionError) -> None:
        """Hold one message, identified by `name`.

        Each is logged, the first ones are kept for the status.
        """
        _log.error("delayed message not released: message=%s reason=%s", name, error)
        if sum(map(len, self._messages.values())) < REASONS_MAX:
            more = f"message {name}: {error}"
            self._messages[bucket] = (*self._messages.get(bucket, ()), more)

    def holds(self, bucket: int) -> bool:
        """Whether the whole bucket is held."""
        return bucket in self._whole

    def reasons(self) -> dict[int, str]:
        """Why something of these buckets is held."""
        return self._parts.copy() | self._whole.copy()

    def texts(self) -> list[str]:
        """Why things are held, with file and place, bounded: buckets, then messages."""
        reasons, messages = self.reasons(), self._messages.copy()
        texts = [reasons[bucket] for bucket in sorted(reasons)]
        texts += [text for bucket in sorted(messages) for text in messages[bucket]]
        return texts[:REASONS_MAX]

    def forget(self, bucket: int) -> None:
        """Forget the damage: this bucket is read again."""
        self._whole.pop(bucket, None)
        self._parts.pop(bucket, None)
        self._messages.pop(bucket, None)
