"""Log lines about subjects that the broker does not take from this token."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

_log = logging.getLogger("qmq.publish")
#: Subjects remembered: more than a producer has. Beyond that they are forgotten, and logged again.
_SUBJECTS_MAX: Final = 1_000


class ForbiddenSubjects:
    """Subjects that one sender may not send to: logged at first, each time refusals have doubled, and at the end.

    For one thread at a time.
    """

    def __init__(self) -> None:
        self._refusals: dict[str, int] = {}

    def refused(self, subject: str, error: Exception) -> None:
        """A batch was sent back because of this subject."""
        if len(self._refusals) >= _SUBJECTS_MAX and subject not in self._refusals:
            self._refusals.clear()
        count = self._refusals[subject] = self._refusals.get(subject, 0) + 1
        if count & (count - 1) == 0:
            _log.warning("messages of subject %s wait, refusals=%d: %s", subject, count, error)

    def taken(self, subjects: Iterable[str]) -> None:
        """The broker took messages of these."""
        if not self._refusals:
            return
        for subject in self._refusals.keys() & set(subjects):
            count = self._refusals.pop(subject)
            _log.info("messages of subject %s are taken again, refusals=%d", subject, count)
