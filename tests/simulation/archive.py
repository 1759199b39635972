"""An archive of the played world: it keeps both logs elsewhere, tells the broker how far, and is never lied to.

It reads what is durable, and says what it has through the broker's own route, which it may hear nothing from. At
each look of the broker at what is to be done by time the store is held to what the archive was told: nothing
goes that it has not got, and what was confirmed is still there after any crash.
"""

from __future__ import annotations

from typing import Final

import msgspec

from qmq_broker.storage.keepers import LogOffsets
from qmq_broker.storage.store import Store
from qmq_client.errors import BrokerUnreachableError
from qmq_client.wire.operations import KeepRequest
from qmq_client.wire.requests import JSON_CONTENT_TYPE, encode_json
from tests.simulation.broker import BrokerHost
from tests.simulation.network import ANSWER_US, Network
from tests.simulation.scheduler import MS, Process, Scheduler

_NAME: Final = "archive"
_PAUSE_US: Final = 1_500 * MS


class Archive:
    """A process that never dies; what it has is told in `faults` as soon as the broker breaks its word."""

    def __init__(
        self, scheduler: Scheduler, host: BrokerHost, network: Network, *, has_reserve: bool
    ) -> None:
        """With `has_reserve` the broker's disk may be too full for the action log to wait."""
        self._scheduler = scheduler
        self._host = host
        self._network = network
        self._has_reserve = has_reserve
        self.process = Process(scheduler, _NAME)
        #: What it has of each log, beginning with nothing.
        self._has = LogOffsets(0, 0)
        #: What the broker has confirmed; None before it has heard of the archive for certain.
        self._confirmed: LogOffsets | None = None
        #: What was found wrong, in sentences.
        self.faults: list[str] = []

    def begin(self) -> None:
        """From now on it archives."""
        self.process.spawn("archives", self._work)

    def look(self, store: Store) -> None:
        """Hold the store to what was confirmed; to be called often, and when it was just opened."""
        keeper = next((one for one in store.keepers.all if one.name == _NAME), None)
        if keeper is None:
            if self._confirmed is not None:
                self._accuse(f"B12: the keeper is forgotten that had {self._confirmed}")
            return
        kept = LogOffsets(keeper.kept_offset, keeper.kept_actions_offset)
        begins = LogOffsets(store.first_offset, store.actions.first_offset)
        lost = LogOffsets(keeper.lost_bytes, keeper.lost_actions_bytes)
        firsts = LogOffsets(keeper.first_offset, keeper.first_actions_offset)
        least = LogOffsets(0, 0) if self._confirmed is None else self._confirmed
        for log in range(1 if self._has_reserve else 2):
            if begins[log] > kept[log] or lost[log]:
                self._accuse(f"B12: of log {log} {begins} went, {kept} is kept, lost {lost}")
            if not least[log] <= kept[log] <= max(self._has[log], firsts[log]):
                self._accuse(f"B12: {kept} is kept, {least} confirmed, {self._has} told")

    def _accuse(self, fault: str) -> None:
        if fault not in self.faults:
            self.faults.append(fault)

    def _work(self) -> None:
        while True:
            self.process.sleep(self._scheduler.rng.randrange(_PAUSE_US), "archives later")
            life = self._host.life
            if life is not None:
                if self._confirmed is not None:  # else nobody waits for it yet
                    self._read(life.store)
                self._tell(life.store.store_id.hex())

    def _read(self, store: Store) -> None:
        """Take some more of each log, as far as it is durable."""
        nexts = (store.durable_offset, store.actions.log.durable_offset)
        rng = self._scheduler.rng
        self._has = LogOffsets(
            *(rng.randint(had, after) for had, after in zip(self._has, nexts, strict=True))
        )

    def _tell(self, store_id: str) -> None:
        told = self._has
        request = KeepRequest(
            name=_NAME, store_id=store_id, kept_offset=told.commit, kept_actions_offset=told.actions
        )
        body = encode_json(request)
        try:
            answer = self._network.call(
                self.process, "keepers/keep", body, ANSWER_US, JSON_CONTENT_TYPE
            )
        except BrokerUnreachableError:
            return
        if answer.status == 200:
            kept = msgspec.json.decode(answer.body)
            self._confirmed = LogOffsets(kept["kept_offset"], kept["kept_actions_offset"])
            self._has = LogOffsets(*map(max, told, self._confirmed))
        elif answer.status == 422:
            self._accuse(f"B12: {told} is refused: {answer.body.decode():.200}")
