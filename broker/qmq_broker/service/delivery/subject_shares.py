"""The number of subjects that each token has created, and its limit.

The owners are stored in the action log, next to the groups, so a restart does not change the
shares. A subject created before there were shares, or by an operator, has no owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from qmq_broker.errors import BusyError, NoRoomError
from qmq_broker.service.delivery.budget import RETRY_AFTER_S
from qmq_broker.service.delivery.journal import Journal
from qmq_broker.service.limits import ServiceLimits
from qmq_client.group.actions import Ended, Owned


class SubjectShares:
    """Belongs to the loop thread."""

    def __init__(self, limits: ServiceLimits, journal: Journal) -> None:
        self._limits = limits
        self._journal = journal
        #: Subject → name of the token.
        self.owners: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    @property
    def tokens(self) -> set[str]:
        """The tokens that created subjects."""
        return {token for token, count in self._counts.items() if count}

    def count_of(self, token: str) -> int:
        """How many subjects this token created."""
        return self._counts[token]

    def restore(self, owners: Mapping[str, str]) -> None:
        """Restore the owners from before the start."""
        self.owners = dict(owners)
        self._counts = Counter(self.owners.values())

    def check(self, new: int, owner: str) -> None:
        """Raise `BusyError` if this token may not create `new` more subjects."""
        count, limit = self._counts[owner], self._limits.subjects_per_token
        if owner and count + new > limit:
            raise too_many(f"subjects made by token {owner}", count, new, limit)

    def note(self, subjects: Sequence[str], owner: str, now_ms: int) -> None:
        """Record that a request of this token created these subjects."""
        new = [name for name in subjects if name not in self.owners] if owner else []
        if not new:
            return
        self.owners.update(dict.fromkeys(new, owner))
        self._counts[owner] += len(new)
        try:
            self._journal.note([Owned(now_ms, name, "", owner) for name in new])
        except NoRoomError:  # then the owner is only known until the next start
            return

    def forget(self, subject: str, now_ms: int) -> None:
        """The subject no longer exists; written to the action log. Raises `NoRoomError`."""
        owner = self.owners.get(subject)
        if owner is not None:
            self._journal.note([Ended(now_ms, subject, "")])
            del self.owners[subject]
            self._counts[owner] -= 1


def too_many(field: str, count: int, new: int, limit: int) -> BusyError:
    """The refusal of more subjects."""
    return BusyError(
        f"there are {count} {field}, and this request has {new} new ones; allowed: {limit}",
        retry_after_s=RETRY_AFTER_S,
        field=field,
        limit=str(limit),
        value=str(count + new),
        remedy="Use existing subjects, and put values that differ from message to message into the key, a tag or a "
        "header; or let an operator remove empty ones: qmq subjects remove.",
    )
