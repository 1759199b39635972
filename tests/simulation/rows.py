"""Who owned which outbox row when: O3, W1 and O2, judged by what the database's triggers told.

Nothing here knows the product's statements. A row belongs to the process that put its token there;
another may take it only when its time has come or it belongs to nobody, and only the owner may change
or remove it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from tests.simulation.scheduler import Process

_LIVE: Final = 0
#: A claim may stamp the row a moment after its statement chose it.
_CLOCK_STEP_MS: Final = 1


@dataclass(frozen=True, slots=True)
class RowChange:
    """One row as a committed statement left it. `old` and `new`: token, due time, state."""

    event: str
    message_id: bytes
    old: tuple[Any, ...]
    new: tuple[Any, ...]
    #: By the database's clock, at the statement.
    at_ms: int


@dataclass(slots=True)
class RowWatch:
    """Judges each change as it is committed."""

    #: What was found wrong, in sentences.
    faults: list[str] = field(default_factory=list)
    #: Ids that the broker has answered for as durable: stored, or stored and cancelled.
    accepted: set[bytes] = field(default_factory=set)
    #: Ids that a process wants back.
    wanted_back: dict[bytes, Process] = field(default_factory=dict)
    _owners: dict[bytes, Process] = field(default_factory=dict)

    def on_change(self, process: Process, change: RowChange) -> None:
        """A committed change by this process."""
        old_token, old_due_ms, old_state = change.old
        new_token = change.new[0]
        if change.event == "INSERT":
            self._own(process, new_token)
            return
        if change.event == "UPDATE" and new_token is not None and new_token != old_token:
            is_due = old_due_ms <= change.at_ms + _CLOCK_STEP_MS
            if old_state != _LIVE or (old_token is not None and not is_due):
                self._accuse(process, change, "W1: took a row before its time", old_token)
            self._own(process, new_token)
            return
        if change.event == "DELETE" and self._is_withdrawn(process, change):
            return
        if old_token is not None and self._owners.get(old_token) is not process:
            self._accuse(process, change, "O3: changed a row of another owner", old_token)
        if change.event == "DELETE" and change.message_id not in self.accepted:
            self._accuse(process, change, "O2: removed a row that was not accepted", old_token)

    def _is_withdrawn(self, process: Process, change: RowChange) -> bool:
        """Taken back while nobody could be sending it, or by the broker's word."""
        token, due_ms, _ = change.old
        is_free = token is None or due_ms <= change.at_ms + _CLOCK_STEP_MS
        is_wanted = self.wanted_back.get(change.message_id) is process
        return is_wanted and (is_free or change.message_id in self.accepted)

    def _own(self, process: Process, token: bytes | None) -> None:
        if token is not None:
            self._owners[token] = process

    def _accuse(self, process: Process, change: RowChange, what: str, token: bytes | None) -> None:
        owner = self._owners.get(token or b"")
        name = "nobody" if owner is None else owner.name
        self.faults.append(
            f"{what}: {process.name} did {change.event} of {change.message_id.hex()}, "
            f"which was {name}'s"
        )
