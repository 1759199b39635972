"""The only writer of the action log: decisions go to the log, then to the state of their group.

It also counts new dead letters for the broker's log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from qmq_broker.errors import NoRoomError, PoisonedError, StoreError
from qmq_broker.service.delivery.budget import Budget
from qmq_broker.storage.store import Store
from qmq_client.group.actions import Action, Dead, MovedBack, Purged, Replayed, Sought
from qmq_client.group.apply import apply_action
from qmq_client.group.state import GroupState

#: How often the same group and reason are logged: people read a line a minute, but not a thousand.
_BETWEEN_S: Final = 60.0
#: Lines of one `take`; the remaining ones come first the next time.
_LINES_MAX: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NewlyDead:
    """Dead letters of one group, for one reason."""

    subject: str
    group: str
    reason: str
    #: How many since this group and reason were last logged.
    messages: int
    #: The sequence of the first of them.
    first_sequence: int


@dataclass(slots=True, eq=False)
class _Unlogged:
    """Dead letters of a group and reason that are not logged yet."""

    first: Dead | None = None
    count: int = 0
    logged_at_s: float = float("-inf")


class DeadLetterDigest:
    """New dead letters, counted by group and reason for the log; belongs to the loop thread.

    No consumer sees a message expire, or a last lease end in silence, and consumers' logs are spread
    over their processes. Each group and reason is logged at most once a minute, so that a million
    expired messages are a few lines. A restart forgets the counts.
    """

    def __init__(self) -> None:
        self._by_cause: dict[tuple[str, str, str], _Unlogged] = {}

    def note(self, action: Dead) -> None:
        """Count a new dead letter."""
        cause = (action.subject, action.group, action.reason)
        unlogged = self._by_cause.get(cause)
        if unlogged is None:
            unlogged = self._by_cause[cause] = _Unlogged()
        unlogged.first = unlogged.first or action
        unlogged.count += 1

    def take(self, now_s: float) -> list[NewlyDead]:
        """The lines to log now; `now_s` is in monotonic seconds."""
        taken: list[NewlyDead] = []
        for cause, unlogged in list(self._by_cause.items()):
            if now_s - unlogged.logged_at_s < _BETWEEN_S:
                continue
            if unlogged.first is None:
                del self._by_cause[cause]
            elif len(taken) < _LINES_MAX:
                taken.append(_newly_dead(unlogged.first, unlogged.count))
                self._by_cause[cause] = _Unlogged(logged_at_s=now_s)
        return taken


def _newly_dead(first: Dead, count: int) -> NewlyDead:
    return NewlyDead(
        subject=first.subject,
        group=first.group,
        reason=first.reason,
        messages=count,
        first_sequence=first.sequence,
    )


#: Actions that may change dead letters.
_CHANGING_LETTERS: Final = (Dead, Sought, Purged, MovedBack, Replayed)


class Journal:
    """The only way into the action log; belongs to the loop thread."""

    def __init__(self, store: Store, budget: Budget, on_poisoned: Callable[[str], None]) -> None:
        """`on_poisoned` is called if the action log fails."""
        self._budget = budget
        self._store = store
        self._on_poisoned = on_poisoned
        #: Whether actions were written since the action log was last synced.
        self.is_unsynced = False
        self.dead_letter_digest = DeadLetterDigest()

    def write(self, actions: Sequence[Action], state: GroupState) -> None:
        """Write the actions and apply them. Requires: they belong to this group.

        Raises `NoRoomError`, or `DiskError` where dead letters cannot be read, both with nothing
        written; or `PoisonedError`.
        """
        if not actions:
            return
        changing = [action for action in actions if isinstance(action, _CHANGING_LETTERS)]
        if not changing:
            self._write(actions, state)
            return
        self._budget.pool.hold()
        try:
            _load_letters(changing, state)
            self._write(actions, state)
        finally:
            self._budget.pool.release()

    def _write(self, actions: Sequence[Action], state: GroupState) -> None:
        self.note(actions)
        try:
            for action in actions:
                apply_action(state, action)
                if type(action) is Dead:
                    self.dead_letter_digest.note(action)
            self._budget.note(state)
        except Exception as error:
            # Log and state now disagree: only a replay of the log can repair that.
            where = f"{state.group} on {state.subject}"
            self._on_poisoned(f"state of group {where}: {type(error).__name__}: {error}")
            raise

    def note(self, actions: Sequence[Action]) -> None:
        """Write without applying: for actions that change no group. Raises like `write`."""
        try:
            self._store.actions.append(actions)
        except NoRoomError:
            raise
        except (StoreError, OSError) as error:
            reason = f"action log: {type(error).__name__}: {error}"
            self._on_poisoned(reason)
            raise PoisonedError(reason) from error
        self.is_unsynced = True


def _load_letters(actions: Sequence[Action], state: GroupState) -> None:
    """Read the dead letters that these actions change, while the actions can still be refused."""
    for action in actions:
        if isinstance(action, Dead | Sought):
            state.dead.load(action.sequence, action.sequence + 1)
        elif isinstance(action, Purged):
            state.dead.load(action.first, action.first + 1)
            state.dead.load(action.next - 1, action.next)
        elif isinstance(action, MovedBack):
            for sequence in (action.next, *state.given()):
                state.dead.load(sequence, sequence + 1)
        elif isinstance(action, Replayed):
            state.dead.load(action.first, action.next)
