"""Journal first: decisions go to the action log, then to the state, here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qmq_broker.errors import NoRoomError, PoisonedError, StoreError
from qmq_broker.service.delivery.budget import Budget
from qmq_broker.service.delivery.dead_tally import DeadTally
from qmq_broker.service.delivery.groups import GroupState
from qmq_broker.service.delivery.moves import apply_action
from qmq_broker.storage.logs.actions import Action, Dead
from qmq_broker.storage.store import Store


class Journal:
    """The only way into the action log; belongs to the loop thread."""

    def __init__(self, store: Store, budget: Budget, on_poisoned: Callable[[str], None]) -> None:
        """`on_poisoned` is called if the action log fails."""
        self._budget = budget
        self._store = store
        self._on_poisoned = on_poisoned
        #: Whether actions were written since the action log was last synced.
        self.is_unsynced = False
        self.dead_tally = DeadTally()

    def write(self, actions: Sequence[Action], state: GroupState) -> None:
        """Write the actions and apply them. Requires: they belong to this group.

        Raises `NoRoomError` with nothing done, or `PoisonedError`.
        """
        if not actions:
            return
        self.note(actions)
        try:
            for action in actions:
                apply_action(state, action)
                if type(action) is Dead:
                    self.dead_tally.note(action)
            self._budget.note(state)
        except Exception as error:
            # Log and state now disagree: only a replay of the log can repair that.
            where = f"{state.group} on {state.subject}"
            self._on_poisoned(f"state of group {where}: {type(error).__name__}: {error}")
            raise

    def note(self, actions: Sequence[Action]) -> None:
        """Only write: for actions that change no group. Raises as `write` does."""
        try:
            self._store.actions.append(actions)
        except NoRoomError:
            raise
        except (StoreError, OSError) as error:
            reason = f"action log: {type(error).__name__}: {error}"
            self._on_poisoned(reason)
            raise PoisonedError(reason) from error
        self.is_unsynced = True
