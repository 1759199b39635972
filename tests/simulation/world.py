"""One played world: what its people share, and what is counted across all of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from qmq_broker.service.delivery.delivery import HandOut
from qmq_client.message import Message
from qmq_client.wire.message_id import format_message_id
from qmq_client.wire.operations import DeadRequest
from qmq_client.wire.requests import PullRequest
from tests.simulation.archive import Archive
from tests.simulation.broker import BrokerHost
from tests.simulation.database import Played
from tests.simulation.ears import Ears
from tests.simulation.handouts import HandOuts
from tests.simulation.network import Network
from tests.simulation.plan import POISON_EVERY, UNWANTED_EVERY, Kind, Plan, Trouble
from tests.simulation.rows import RowWatch
from tests.simulation.scheduler import Scheduler
from tests.simulation.shelf import Shelf
from tests.simulation.watch import Watch

if TYPE_CHECKING:
    from tests.simulation.people import Machine

_BODY_BYTES_MAX = 60


class World:
    """Everything that a process may ask for. One thread."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.scheduler = Scheduler(plan.seed)
        self.rows = RowWatch()
        self.ears = Ears(self.scheduler, self.rows)
        self.played = Played(self.scheduler, self.rows.on_change)
        self.host = BrokerHost(self.scheduler, plan)
        self.shelf = Shelf()
        self.handouts = HandOuts(self.host, plan.groups)
        self.network = Network(
            self.scheduler, Watch(self._on_hand_out, self.handouts.on_settled, self._on_replay)
        )
        has_reserve = Trouble.FULL_DISK in plan.troubles
        self.archive = Archive(self.scheduler, self.host, self.network, has_reserve=has_reserve)
        self.machines: list[Machine] = []
        #: Transactions of handlers and of applications, whose truth is asked for at the end.
        self.labels: list[str] = []
        #: Messages that somebody wanted back: True when the broker said that they are cancelled.
        self.taken_back: dict[str, bool] = {}
        #: Dead letters of ordered groups, by group and sequence, that somebody replayed.
        self.replayed: set[tuple[str, int]] = set()
        #: When the groups that only look were moved to the beginning for the last time, and where it
        #: was by subject.
        self.sought_at_ns = 0
        self.sought: dict[str, int] = {}
        #: Groups and messages that a handler was done with.
        self.handled: set[tuple[str, str]] = set()
        #: Whether nothing is wrong with messages and handlers any more.
        self.is_cured = False
        self._messages = 0
        self._transactions_left = plan.transactions

    def take_transaction(self) -> bool:
        """Whether there is another transaction to be done."""
        self._transactions_left -= 1
        return self._transactions_left >= 0

    @property
    def is_all_sent(self) -> bool:
        """Whether no application does anything any more."""
        return not any(machine.is_sending for machine in self.machines)

    def new_label(self, name: str) -> str:
        """A name for one transaction."""
        label = f"{name}-{len(self.labels)}"
        self.labels += (label, f"{label}/s")
        return label

    def new_message(
        self, subject: str, *, key: str | None = None, is_repeatable: bool = False
    ) -> Message:
        """A message that nobody has sent before; a repeatable one has its id from a dedupe key."""
        rng, plan = self.scheduler.rng, self.plan
        self._messages += 1
        delay = ttl = None
        if plan.has_delays and rng.random() < 0.3:
            delay, key = timedelta(milliseconds=rng.randrange(8_000)), None
        if plan.has_expiry and rng.random() < 0.2:
            ttl = timedelta(milliseconds=rng.randrange(1, 6_000))
        return Message(
            subject,
            rng.randbytes(rng.randrange(_BODY_BYTES_MAX)),
            key=key,
            delay=delay,
            ttl=ttl,
            message_id=None if is_repeatable else format_message_id(self._messages.to_bytes(16)),
            dedupe_key=f"repeatable {self._messages}" if is_repeatable else None,
        )

    def is_poison(self, message_id: str) -> bool:
        """Whether no handler can handle this message before it is cured."""
        rest = self.plan.poison_rest
        is_poison = rest is not None and int(message_id, 16) % POISON_EVERY == rest
        return is_poison and not self.is_cured

    def is_unwanted(self, message_id: str) -> bool:
        """Whether handlers that settle by hand reject this message before it is cured."""
        return int(message_id, 16) % UNWANTED_EVERY == 0 and not self.is_cured

    def _on_hand_out(self, request: PullRequest, given: HandOut, now_ms: int) -> None:
        self.ears.on_hand_out(request, given)
        self.handouts.on_hand_out(request, given, now_ms, self.ears.now_ns())

    def _on_replay(self, request: DeadRequest, sequences: Sequence[int]) -> None:
        """In an ordered group those behind a dead letter go on: the checker must know of it."""
        (group,) = (one for one in self.plan.groups if one.name == request.group)
        if group.kind is Kind.ORDERED:
            self.replayed.update((group.name, sequence) for sequence in sequences)
