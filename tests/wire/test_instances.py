"""Which of several processes is the consumer of a broadcast, whatever the order of their requests."""

from __future__ import annotations

from qmq_client.wire.groups import Instances
from qmq_client.wire.requests import BroadcastMember, PullRequest

MINUTE_MS = 60_000


def pull_of(instance: str, lease_ms: int = 30_000) -> PullRequest:
    return PullRequest(
        subject="orders",
        group="board",
        consumer="one",
        lease_ms=lease_ms,
        broadcast=BroadcastMember(kind="named", instance=instance),
    )


def test_C10_a_late_request_of_a_dead_process_shuts_its_successor_out_for_a_minute_only() -> None:
    instances = Instances()
    assert instances.admits(pull_of("second"), 0)
    assert instances.admits(pull_of("first"), 10), "late, after a restart of the broker"
    assert not instances.admits(pull_of("second"), 10 + MINUTE_MS)
    assert instances.admits(pull_of("second"), 11 + MINUTE_MS)
    assert not instances.admits(pull_of("first"), 12 + MINUTE_MS)


def test_C10_who_pulls_or_settles_is_not_silent_and_a_lease_may_be_longer_than_a_minute() -> None:
    instances = Instances()
    assert instances.admits(pull_of("first"), 0)
    assert instances.admits(pull_of("second"), 0)
    instances.seen(MINUTE_MS)
    assert not instances.admits(pull_of("first"), 2 * MINUTE_MS)
    assert not instances.admits(pull_of("first", 10 * MINUTE_MS), 11 * MINUTE_MS)
    assert instances.admits(pull_of("second"), 11 * MINUTE_MS)
    assert not instances.admits(pull_of("first", 10 * MINUTE_MS), 20 * MINUTE_MS)
