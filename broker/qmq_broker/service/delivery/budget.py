"""The memory of all groups, and the share of each token.

Groups are small, but the messages in them add up: messages in flight or waiting, their histories, dead
letters. Each group's memory is counted whenever it changes (`GroupState.memory_bytes`), so the sum is known
at any time; dead letters that are in memory are counted by their pool. Beyond the limit, groups get
no new messages; messages that they already hold are delivered and settled as usual, which reduces
the sum. The groups of one token together have a smaller limit, so that one caller cannot use the
memory of all. The same holds for the length of dead letters, which are mostly in files.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

from qmq_broker.errors import BusyError
from qmq_broker.service.delivery.letter_pool import LetterPool
from qmq_broker.service.limits import ServiceLimits
from qmq_client.group.state import GroupState

#: A caller with too many groups, or too many messages in them, may try again after this long.
RETRY_AFTER_S: Final = 60.0
#: Memory may be free again as soon as messages are acked.
_MEMORY_RETRY_AFTER_S: Final = 5.0
_REMEDY: Final = (
    "Settle delivered messages; replay or purge dead letters (qmq dead); remove unused groups "
    "(qmq groups remove)."
)


class _Used(NamedTuple):
    """The memory and dead letters of one group."""

    memory_bytes: int
    dead_letters_bytes: int


_NOTHING: Final = _Used(0, 0)


class Budget:
    """Counts the memory of all groups. Owned by the loop thread."""

    def __init__(self, limits: ServiceLimits, pool: LetterPool) -> None:
        self._limits = limits
        #: The dead letters in memory.
        self.pool = pool
        self._counted: dict[tuple[str, str], _Used] = {}
        self._owners: dict[tuple[str, str], str] = {}
        self._states_bytes = 0
        #: Length of all dead letters, in memory or not.
        self.dead_letters_bytes = 0
        #: For each known token: the memory of its groups, the length of their dead letters, and the number of groups.
        self.bytes_of: Counter[str] = Counter()
        self.dead_letters_bytes_of: Counter[str] = Counter()
        self.groups_of: Counter[str] = Counter()

    @property
    def memory_bytes(self) -> int:
        """The memory of all groups, roughly."""
        return self._states_bytes + self.pool.memory_bytes

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return len(self._counted)

    def note(self, state: GroupState) -> None:
        """Count a new or changed group."""
        key = (state.subject, state.group)
        before = self._counted.get(key)
        if before is None:
            self.groups_of[state.owner] += 1
        elif self._owners[key] != state.owner:
            self.forget(state)
            before = None
            self.groups_of[state.owner] += 1
        now = _Used(state.memory_bytes, state.dead.encoded_bytes)
        self._counted[key], self._owners[key] = now, state.owner
        self._add(state.owner, now, before or _NOTHING)

    def forget(self, state: GroupState) -> None:
        """Forget a group that has ended."""
        key = (state.subject, state.group)
        before = self._counted.pop(key, None)
        if before is None:
            return
        owner = self._owners.pop(key)
        self._add(owner, _NOTHING, before)
        self.groups_of[owner] -= 1
        if not self.groups_of[owner]:
            del self.groups_of[owner], self.bytes_of[owner], self.dead_letters_bytes_of[owner]

    def _add(self, owner: str, now: _Used, before: _Used) -> None:
        self._states_bytes += now.memory_bytes - before.memory_bytes
        self.bytes_of[owner] += now.memory_bytes - before.memory_bytes
        self.dead_letters_bytes += now.dead_letters_bytes - before.dead_letters_bytes
        self.dead_letters_bytes_of[owner] += now.dead_letters_bytes - before.dead_letters_bytes

    def refusal(self, owner: str, *, more_bytes: int = 0) -> BusyError | None:
        """The reason why groups of this token get no new messages; None if there is room, also after `more_bytes`."""
        limits, used_bytes = self._limits, self.memory_bytes + more_bytes
        if used_bytes >= limits.groups_bytes:
            return _refusal("memory of all groups", used_bytes, limits.groups_bytes)
        used_bytes = self.bytes_of[owner] + more_bytes
        if owner and used_bytes >= limits.groups_bytes_per_token:
            of = f"memory of the groups of token {owner}"
            return _refusal(of, used_bytes, limits.groups_bytes_per_token)
        return self._refusal_of_dead_letters(owner)

    def _refusal_of_dead_letters(self, owner: str) -> BusyError | None:
        limits = self._limits
        if self.dead_letters_bytes >= limits.dead_letters_bytes:
            of = "length of all dead letters"
            return _refusal(of, self.dead_letters_bytes, limits.dead_letters_bytes)
        used_bytes = self.dead_letters_bytes_of[owner]
        if owner and used_bytes >= limits.dead_letters_bytes_per_token:
            of = f"length of the dead letters of token {owner}"
            return _refusal(of, used_bytes, limits.dead_letters_bytes_per_token)
        return None

    def check_room(self, owner: str, more_bytes: int) -> None:
        """Raise `BusyError` if another group of this many bytes would get no messages."""
        if (refusal := self.refusal(owner, more_bytes=more_bytes)) is not None:
            raise refusal

    def check_new_group(self, owner: str) -> None:
        """Raise `BusyError` if this token may not create another group."""
        self.check_room(owner, 0)
        groups, limits = len(self._counted), self._limits
        if groups >= limits.groups:
            raise too_many("groups", groups, limits.groups)
        if owner and self.groups_of[owner] >= limits.groups_per_token:
            of = f"groups made by token {owner}"
            raise too_many(of, self.groups_of[owner], limits.groups_per_token)


def too_many(field: str, count: int, limit: int) -> BusyError:
    """The refusal of another group."""
    return BusyError(
        f"there are {count} {field}; allowed: {limit}",
        retry_after_s=RETRY_AFTER_S,
        field=field,
        limit=str(limit),
        value=str(count),
        remedy="Remove unused groups: qmq groups remove.",
    )


def _refusal(field: str, used_bytes: int, limit_bytes: int) -> BusyError:
    return BusyError(
        f"the {field} is {used_bytes} bytes; new messages are delivered below {limit_bytes} bytes",
        retry_after_s=_MEMORY_RETRY_AFTER_S,
        field=field,
        limit=f"{limit_bytes} bytes",
        value=f"{used_bytes} bytes",
        remedy=_REMEDY,
    )
