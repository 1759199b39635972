"""Log lines about subjects that the broker refuses from this token."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

_log = logging.getLogger("qmq.publish")
#: Most remembered subjects, more than a producer has. Beyond that they are forgotten, and logged again.
_SUBJECTS_MAX: Final = 1_000


class ForbiddenSubjects:
    """Subjects that one sender may not send to: logged at the first refusal, each time refusals
    have doubled, and at the end.

    For one thread at a time.
    """

    def __init__(self) -> None:
        self._refusals: dict[str, int] = {}

    def refused(self, subject: str, error: Exception) -> None:
        """Record that a batch was refused because of this subject."""
        if len(self._refusals) >= _SUBJECTS_MAX and subject not in self._refusals:
            self._refusals.clear()
        count = self._refusals[subject] = self._refusals.get(subject, 0) + 1
        if count & (count - 1) == 0:
            _log.warning("messages of subject %s wait, refusals=%d: %s", subject, count, error)

    def taken(self, subjects: Iterable[str]) -> None:
        """Record that the broker accepted messages of these subjects."""
        if not self._refusals:
            return
        for subject in self._refusals.keys() & set(subjects):
            count = self._refusals.pop(subject)
            _log.info("messages of subject %s are accepted again, refusals=%d", subject, count)
