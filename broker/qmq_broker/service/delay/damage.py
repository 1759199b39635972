"""The register of damaged delayed messages, which are held back; all others are released.

Damage in a schedule log holds the messages of one frame, a few thousand at most. Damage in a dispatch
log holds the whole bucket: without all states, messages that were released or cancelled would be
released again.
"""

from __future__ import annotations

import logging
from typing import Final

from qmq_broker.errors import CorruptionError

_log = logging.getLogger(__name__)
#: Maximum number of reasons in a status, and of reasons of single messages that are kept.
REASONS_MAX: Final = 10


class Damage:
    """Damaged buckets and messages, held until they are read again. The loading thread writes it."""

    def __init__(self) -> None:
        self._whole: dict[int, str] = {}
        self._parts: dict[int, str] = {}
        self._messages: dict[int, tuple[str, ...]] = {}

    def hold_bucket(self, bucket: int, error: CorruptionError) -> None:
        """Hold the whole bucket."""
        if bucket not in self._whole:
            _log.error("delayed messages of a bucket are held: reason=%s", error)
        self._whole[bucket] = str(error)

    def hold_part(self, bucket: int, error: CorruptionError) -> None:
        """Hold part of the bucket; only its first damaged part is reported."""
        if bucket not in self._parts:
            _log.error("some delayed messages of a bucket are held: reason=%s", error)
            self._parts[bucket] = str(error)

    def hold_message(self, bucket: int, name: str, error: CorruptionError) -> None:
        """Hold one message, identified by `name` in texts.

        Each one is logged; only the first ones are kept for the status.
        """
        _log.error("delayed message not released: message=%s reason=%s", name, error)
        if sum(map(len, self._messages.values())) < REASONS_MAX:
            more = f"message {name}: {error}"
            self._messages[bucket] = (*self._messages.get(bucket, ()), more)

    def holds(self, bucket: int) -> bool:
        """Whether the whole bucket is held."""
        return bucket in self._whole

    def reasons(self) -> dict[int, str]:
        """The reason why a bucket, or part of it, is held, by bucket."""
        return self._parts.copy() | self._whole.copy()

    def texts(self) -> list[str]:
        """Up to `REASONS_MAX` reasons with file and place: first those of buckets, then those of messages."""
        reasons, messages = self.reasons(), self._messages.copy()
        texts = [reasons[bucket] for bucket in sorted(reasons)]
        texts += [text for bucket in sorted(messages) for text in messages[bucket]]
        return texts[:REASONS_MAX]

    def forget(self, bucket: int) -> None:
        """Forget the damage of this bucket, because it is read again."""
        self._whole.pop(bucket, None)
        self._parts.pop(bucket, None)
        self._messages.pop(bucket, None)
