"""How much of the broker's room is used: of all that callers can bring into being, and by which token.

For `status`, the metrics and the doctor: what is refused at a bound can be seen to come.
"""

from __future__ import annotations

from typing import Final

import msgspec

from qmq_broker.service.delivery.delivery import Delivery
from qmq_broker.service.intake import Intake
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.writer import CommitWriter

#: Tokens that are listed, those that use most first.
TOKENS_LISTED_MAX: Final = 100


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """One bound, by its name in `ServiceLimits`."""

    name: str
    used: int
    limit: int


class TokenShare(msgspec.Struct, frozen=True, kw_only=True):
    """What the callers with one token brought into being and still is there."""

    token: str
    subjects: int
    groups: int
    groups_bytes: int


class RoomStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All bounds, and the shares of the tokens with their limits."""

    bounds: tuple[Bound, ...]
    tokens: tuple[TokenShare, ...]
    subjects_per_token: int
    groups_per_token: int
    groups_bytes_per_token: int


class Room:
    """Belongs to the loop thread."""

    def __init__(
        self, delivery: Delivery, intake: Intake, writer: CommitWriter, limits: ServiceLimits
    ) -> None:
        self._delivery = delivery
        self._intake = intake
        self._writer = writer
        self._limits = limits

    def bounds(self) -> tuple[Bound, ...]:
        """Each bound over all callers."""
        delivery = self._delivery
        used = {
            "subjects": self._intake.subjects_count,
            "groups": delivery.budget.groups,
            "groups_bytes": delivery.budget.memory_bytes,
            "waiting_pulls": delivery.waiting.count,
            "commit_queue_bytes": self._writer.waiting_bytes,
        }
        return tuple(
            Bound(name=name, used=count, limit=getattr(self._limits, name))
            for name, count in used.items()
        )

    def status(self) -> RoomStatus:
        """The bounds, and which token uses how much."""
        budget, shares = self._delivery.budget, self._delivery.subject_shares
        tokens = [
            TokenShare(
                token=token,
                subjects=shares.count_of(token),
                groups=budget.groups_of[token],
                groups_bytes=budget.bytes_of[token],
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
        )
