"""A broker with long retries, whose time and steps belong to the test."""

from __future__ import annotations

from qmq_client.group.state import GroupState
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig
from tests.broker.service.rig import GROUP, SUBJECT

DAY_MS = 24 * HOUR_MS
MONTH_MS = 30 * DAY_MS


class LongRetryRig(DelayRig):
    """Time and long retries advance when the test says so."""

    def turn(self) -> None:
        """What the broker does by time, until nothing changes."""
        for _ in range(4):
            self.broker.long_retries.step(self.now_ms)
            self.clock.pass_ms(1_000)
            self.commit()
        self.broker.delivery.step(self.now_ms)

    def pass_and_turn(self, ms: int) -> None:
        """Let time pass, release what is due, and do what is done by time."""
        self.clock.pass_ms(ms)
        self.release()
        self.turn()

    def start_long_retries(self, *bodies: bytes) -> None:
        """Send, pull, and nack for a month."""
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
