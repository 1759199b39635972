"""An operator of the played world: asks the broker's routes, and may hear nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from qmq_client.errors import BrokerUnreachableError
from qmq_client.wire.operations import DeadAnswer, DeadRequest, StateChange
from qmq_client.wire.requests import JSON_CONTENT_TYPE, encode_json
from tests.simulation.network import ANSWER_US
from tests.simulation.plan import GroupPlan
from tests.simulation.scheduler import MS, Process
from tests.simulation.world import World


class Operator:
    """A process that never dies. Each request is a strand of it, unless called from one."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.process = Process(world.scheduler, "operator")
        #: Wishes to close the broker that wait for their answers.
        self._closing = 0

    @property
    def is_closing(self) -> bool:
        """Whether the broker may still hear that it is to take no messages, however late."""
        return bool(self._closing) or self._world.network.has_under_way(self.process)

    def close_for(self, delay_us: int) -> None:
        """Let the broker take no messages for a while, as far as it hears of it."""

        def work() -> None:
            self._set_state("read-only")
            self._closing -= 1
            self.process.sleep(delay_us, "has time")
            self._set_state("serving")

        self._closing += 1
        self.process.spawn("changes the state", work)

    def replay(self, group: GroupPlan) -> None:
        """Replay the group's dead letters, as far as the broker hears of it."""

        def work() -> None:
            self._replay(group)

        self.process.spawn("replays", work)

    def replay_all(self) -> None:
        """Replay until there is none. Requires: no trouble any more, in a strand."""
        for group in self._world.plan.groups:
            answer = self._replay(group)
            while answer is None or answer.has_more:
                self.process.sleep(200 * MS, "asks again")
                answer = self._replay(group)

    def _replay(self, group: GroupPlan) -> DeadAnswer | None:
        request = DeadRequest(subject=group.subject, group=group.name)
        data = self._ask("dead/replay", request)
        return None if data is None else msgspec.json.decode(data, type=DeadAnswer)

    def _set_state(self, state: Any) -> None:
        self._ask("state", StateChange(state=state, reason="an operator's wish"))

    def _ask(self, route: str, body: msgspec.Struct) -> bytes | None:
        network = self._world.network
        try:
            answer = network.call(
                self.process, route, encode_json(body), ANSWER_US, JSON_CONTENT_TYPE
            )
        except BrokerUnreachableError as error:
            self._world.scheduler.note(f"the operator hears nothing: {error}")
            return None
        self._world.scheduler.note(f"the operator is answered: {answer.status}")
        return answer.body if answer.status == 200 else None
