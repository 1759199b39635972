"""The use of the broker's limits on objects that callers create, in total and by token.

For `status`, the metrics and the doctor, which show that a limit is near before requests are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from qmq_broker.service.delivery.delivery import Delivery
from qmq_broker.service.intake import Intake
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.writer import CommitWriter

#: Most tokens in the list, those with the highest use first.
TOKENS_LISTED_MAX: Final = 100


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """One limit, by its name in `ServiceLimits`."""

    name: str
    used: int
    limit: int


class TokenShare(msgspec.Struct, frozen=True, kw_only=True):
    """What the callers with one token have created that still exists."""

    token: str
    subjects: int
    groups: int
    groups_bytes: int
    dead_letters_bytes: int


class DeadLettersRoom(msgspec.Struct, frozen=True, kw_only=True):
    """The room that the dead letters of all groups take, in memory and in files."""

    letters: int
    #: Memory of the most recently used ones, and its limit.
    memory_bytes: int
    memory_bytes_max: int
    #: Length of the files that hold the others.
    file_bytes: int


class RoomStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All limits, and the shares of the tokens with their limits."""

    bounds: tuple[Bound, ...]
    tokens: tuple[TokenShare, ...]
    subjects_per_token: int
    groups_per_token: int
    groups_bytes_per_token: int
    dead_letters_bytes_per_token: int
    dead_letters: DeadLettersRoom


class Room:
    """Belongs to the loop thread."""

    def __init__(
        self, delivery: Delivery, intake: Intake, writer: CommitWriter, limits: ServiceLimits
    ) -> None:
        self._delivery = delivery
        self._intake = intake
        self._writer = writer
        self._limits = limits
        #: The limits of the HTTP layer.
        self.bounds_of_face: Callable[[], tuple[Bound, ...]] = tuple

    def bounds(self) -> tuple[Bound, ...]:
        """Each limit that all callers share."""
        delivery = self._delivery
        used = {
            "subjects": self._intake.subjects_count,
            "groups": delivery.budget.groups,
            "groups_bytes": delivery.budget.memory_bytes,
            "dead_letters_bytes": delivery.budget.dead_letters_bytes,
            "waiting_pulls": delivery.waiting.count,
            "commit_queue_bytes": self._writer.waiting_bytes,
        }
        bounds = tuple(
            Bound(name=name, used=count, limit=getattr(self._limits, name))
            for name, count in used.items()
        )
        return (*bounds, *self.bounds_of_face())

    def status(self) -> RoomStatus:
        """The limits, and the use of each token."""
        budget, shares = self._delivery.budget, self._delivery.subject_shares
        tokens = [
            TokenShare(
                token=token,
                subjects=shares.count_of(token),
                groups=budget.groups_of[token],
                groups_bytes=budget.bytes_of[token],
                dead_letters_bytes=budget.dead_letters_bytes_of[token],
            )
            for token in shares.tokens | budget.groups_of.keys()
            if token
        ]
        tokens.sort(key=lambda one: (-one.groups_bytes, -one.subjects - one.groups, one.token))
        limits = self._limits
        return RoomStatus(
            bounds=self.bounds(),
            tokens=tuple(tokens[:TOKENS_LISTED_MAX]),
            subjects_per_token=limits.subjects_per_token,
            groups_per_token=limits.groups_per_token,
            groups_bytes_per_token=limits.groups_bytes_per_token,
            dead_letters_bytes_per_token=limits.dead_letters_bytes_per_token,
            dead_letters=self.dead_letters(),
        )

    def dead_letters_bytes(self) -> tuple[int, int]:
        """Bytes of the most recently used dead letters, in memory, and of the others, in files."""
        return self._delivery.pool.memory_bytes, self._delivery.pool.file_bytes

    def dead_letters(self) -> DeadLettersRoom:
        """The room that the dead letters of all groups take, in memory and in files."""
        pool = self._delivery.pool
        return DeadLettersRoom(
            letters=sum(len(state.dead) for state in self._delivery.groups()),
            memory_bytes=pool.memory_bytes,
            memory_bytes_max=pool.bytes_max,
            file_bytes=pool.file_bytes,
        )
