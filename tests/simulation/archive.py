"""An archive of the played world: it keeps both logs elsewhere, tells the broker how far, and is never lied to.

It reads what is durable, and says what it has through the broker's own route, which it may hear nothing from. At
each look of the broker at what is to be done by time the store is held to what the archive was told: nothing
goes that it has not got, unless by force, and that is counted; what was confirmed is still there after any crash,
and who was removed stays away until it is heard of again.
"""

from __future__ import annotations

from typing import Final

import msgspec

from qmq_broker.storage.files.keepers import Keeper
from qmq_broker.storage.keepers import LogOffsets, lost_bytes
from qmq_broker.storage.store import Store
from qmq_client.errors import BrokerUnreachableError
from qmq_client.wire.operations import KeeperRequest, KeepRequest
from qmq_client.wire.requests import JSON_CONTENT_TYPE, encode_json
from tests.simulation.broker import BrokerHost
from tests.simulation.face import Answer
from tests.simulation.network import ANSWER_US, Network
from tests.simulation.scheduler import MS, Process, Scheduler

_NAME: Final = "archive"
_PAUSE_US: Final = 1_500 * MS
_NOTHING: Final = LogOffsets(0, 0)


class Archive:
    """A process that never dies; what it has is told in `faults` as soon as the broker breaks its word."""

    def __init__(
        self, scheduler: Scheduler, host: BrokerHost, network: Network, *, has_reserve: bool
    ) -> None:
        """With `has_reserve` the broker's disk may be too full for the action log to wait."""
        self._scheduler = scheduler
        self._host = host
        self._network = network
        self._logs = range(1 if has_reserve else 2)
        self.process = Process(scheduler, _NAME)
        #: Somebody who removes it.
        self.remover = Process(scheduler, "archive's remover")
        #: Removals that wait for their answer, and how many there ever were.
        self._removals = 0
        self._removed = 0
        #: How often it has told the broker anything.
        self._said = 0
        #: It reads nothing before this time.
        self._rests_until_us = 0
        #: Whether a removal was answered, and nothing said since that could bring the keeper back.
        self._is_removed = False
        #: What it has of each log, beginning with nothing.
        self._has = _NOTHING
        #: What the broker has confirmed; None before it has heard of the archive for certain.
        self._confirmed: LogOffsets | None = None
        #: Bytes of each log that were gone when it wanted to read them.
        self._missed = _NOTHING
        #: What it had lost at the last look, by the store's account.
        self._lost = _NOTHING
        #: What was kept by then.
        self._kept = _NOTHING
        self._was_forced = False
        #: What was found wrong, in sentences.
        self.faults: list[str] = []

    def begin(self) -> None:
        """From now on it archives."""
        self.process.spawn("archives", self._work)

    def remove(self) -> None:
        """Let the broker wait for it no more, as far as it hears of it."""

        def work() -> None:
            said, is_quiet = self._said, not self._network.has_under_way(self.process)
            answer = self._ask(self.remover, "keepers/remove", KeeperRequest(name=_NAME))
            is_done = answer is not None and answer.status == 200
            self._is_removed = is_done and is_quiet and said == self._said
            self._removals -= 1

        self._removals += 1
        self._removed += 1
        self._confirmed = None
        self.remover.spawn("removes the archive", work)

    def rest_for(self, delay_us: int) -> None:
        """Read nothing for a while; it is heard of all the same."""
        self._rests_until_us = self._scheduler.now_us + delay_us

    @property
    def _may_be_removed(self) -> bool:
        """Whether the broker may still hear that it is to wait no more, however late."""
        return bool(self._removals) or self._network.has_under_way(self.remover)

    def look_at_begin(self, store: Store, *, is_forced: bool) -> None:
        """Hold a store to what was confirmed that was just opened."""
        # By force something may have gone that nobody saw going, or a power cut brought it back.
        is_sure = not (is_forced or self._was_forced)
        self._was_forced = is_forced
        self._judge(store, may_lose=not is_sure, may_find=True)

    def look(self, store: Store, *, is_forced: bool) -> None:
        """The same; to be called often."""
        self._judge(store, may_lose=is_forced, may_find=False)

    def _judge(self, store: Store, *, may_lose: bool, may_find: bool) -> None:
        keeper = next((one for one in store.keepers.all if one.name == _NAME), None)
        if keeper is None:
            if self._confirmed is not None:
                self._accuse(f"B12: the keeper is forgotten that had {self._confirmed}")
            return
        if self._is_removed:
            self._accuse(f"B12: the keeper is there that was removed: {keeper}")
        kept = LogOffsets(keeper.kept_offset, keeper.kept_actions_offset)
        lost = lost_bytes(keeper, LogOffsets(store.first_offset, store.actions.first_offset))
        self._judge_place(keeper, kept)
        if self._confirmed is not None:
            for log in self._logs:
                # A word that comes late may say that it had read what is gone by now.
                gained = max(0, kept[log] - self._kept[log])
                is_less = lost[log] < self._lost[log] - gained and not may_find
                is_more = lost[log] > self._lost[log] and not may_lose
                if is_less or is_more or lost[log] < self._missed[log]:
                    self._accuse(
                        f"B12: {kept} is kept, lost {lost}, before {self._lost}, "
                        f"{self._missed} was not there"
                    )
        self._lost, self._kept = lost, kept

    def _judge_place(self, keeper: Keeper, kept: LogOffsets) -> None:
        firsts = LogOffsets(keeper.first_offset, keeper.first_actions_offset)
        least = self._confirmed or _NOTHING
        for log in self._logs:
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
                is_resting = self._scheduler.now_us < self._rests_until_us
                if self._confirmed is not None and not is_resting:  # else nobody waits for it yet
                    self._read(life.store)
                self._tell(life.store.store_id.hex())

    def _read(self, store: Store) -> None:
        """Take some more of each log, as far as it is durable and still there."""
        begins = LogOffsets(store.first_offset, store.actions.first_offset)
        nexts = (store.durable_offset, store.actions.log.durable_offset)
        rng, had = self._scheduler.rng, LogOffsets(*map(max, self._has, begins))
        missed = (first - last for first, last in zip(had, self._has, strict=True))
        self._missed = LogOffsets(*map(sum, zip(self._missed, missed, strict=True)))
        self._has = LogOffsets(
            *(rng.randint(first, after) for first, after in zip(had, nexts, strict=True))
        )

    def _tell(self, store_id: str) -> None:
        told = self._has
        request = KeepRequest(
            name=_NAME, store_id=store_id, kept_offset=told.commit, kept_actions_offset=told.actions
        )
        is_sure, removed_before = not self._may_be_removed, self._removed
        self._is_removed = False
        self._said += 1
        answer = self._ask(self.process, "keepers/keep", request)
        if answer is None:
            return
        if answer.status == 200 and is_sure and self._removed == removed_before:
            kept = msgspec.json.decode(answer.body)
            if self._confirmed is None:
                self._missed = _NOTHING  # what went while nobody waited is no loss
                self._lost = LogOffsets(kept["lost_bytes"], kept["lost_actions_bytes"])
            self._confirmed = LogOffsets(kept["kept_offset"], kept["kept_actions_offset"])
            self._has = LogOffsets(*map(max, told, self._confirmed))
        elif answer.status == 422:
            self._accuse(f"B12: {told} is refused: {answer.body.decode():.200}")

    def _ask(self, process: Process, route: str, request: msgspec.Struct) -> Answer | None:
        """The broker's answer; None if nothing was heard."""
        body = encode_json(request)
        try:
            return self._network.call(process, route, body, ANSWER_US, JSON_CONTENT_TYPE)
        except BrokerUnreachableError:
            return None
