"""A broker whose groups set messages aside, with time and all that is done by it in the test's hand."""

from __future__ import annotations

from qmq_client.group.state import GroupState
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig
from tests.broker.service.rig import GROUP, SUBJECT

DAY_MS = 24 * HOUR_MS
MONTH_MS = 30 * DAY_MS


class AsideRig(DelayRig):
    """Time, and what is set aside, pass when the test says so."""

    def turn(self) -> None:
        """What the broker does by time, until nothing changes."""
        for _ in range(4):
            self.broker.setting_aside.step(self.now_ms)
            self.clock.pass_ms(1_000)
            self.commit()
        self.broker.delivery.step(self.now_ms)

    def pass_and_turn(self, ms: int) -> None:
        """Let time pass, release what is due, and do what is done by time."""
        self.clock.pass_ms(ms)
        self.release()
        self.turn()

    def put_away(self, *bodies: bytes) -> None:
        """Send, hand out, and give back for long."""
        for body in bodies:
            self.send(body)
        self.settle(self.pull().nack(MONTH_MS, "not before spring"))
        self.turn()

    @property
    def state(self) -> GroupState:
        """The group as it is."""
        found = self.broker.delivery.group(SUBJECT, GROUP)
        assert found is not None
        return found
