"""Bounds of the service, each with its name, unit and reason. Printed at start.

Over a bound a request is refused with the bound's name and a time to come back; the broker never
grows without end and never dies of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from qmq_client.wire.limits import DEFAULT_LIMITS


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """What one broker holds in memory at most, and how long things may take."""

    #: Bytes of accepted requests that wait for their commit: one second of a fast disk.
    commit_queue_bytes: int = 64 * 1024 * 1024
    #: A disk that lets a request wait longer is not asked for more (RocketMQ's page-cache-busy
    #: check, with the same second).
    commit_queue_age_ms: int = 1_000
    #: Subjects; each costs an open file and some kilobytes.
    subjects: int = 10_000
    #: Groups over all subjects.
    groups: int = 10_000
    #: Consumers of one group that hold something or were seen lately.
    consumers_per_group: int = 1_000
    #: A consumer that holds nothing is forgotten after this time without a sign of life.
    consumer_idle_ms: int = 3_600_000
    #: A broadcast's consumer that nobody knows after its end goes when it was not seen for so long:
    #: five waits of the longest pull …
    ephemeral_idle_ms: int = 300_000
    #: … and one that comes again under its name, as long as a dead letter holds its message.
    named_idle_ms: int = 7 * 24 * 3_600_000
    #: Messages that one consumer may hold unsettled.
    in_flight_per_consumer: int = 20_000
    #: Messages of one group that are in flight, wait for redelivery within the horizon or for those
    #: before them of their key, before new ones are held back.
    unsettled_per_group: int = 200_000
    #: Dead letters of one group kept in memory, about 300 bytes each.
    dead_letters_per_group: int = 1_000_000
    #: A dead letter holds its message back from the retention for so long.
    dead_letter_ms: int = 7 * 24 * 3_600_000
    #: Pulls that wait for messages, over all groups.
    waiting_pulls: int = 2_000
    #: Longest wait of one pull; below the 60 s after which many proxies give up.
    wait_ms: int = 50_000
    #: Shortest and longest lease.
    lease_ms_min: int = 50
    lease_ms: int = 12 * 3_600_000
    #: However often a lease is extended, the message comes back so long after it was given.
    held_ms: int = 24 * 3_600_000
    #: Tags of one filter.
    filter_tags: int = 64
    #: Longest wait of a group's backoff.
    backoff_ms: int = 24 * 3_600_000
    #: Dead letters that one request replays or purges.
    dead_letters_per_request: int = 10_000
    #: Longest wait that a nack may ask for: as long as a message may be delayed.
    nack_delay_ms: int = DEFAULT_LIMITS.delay_ms
    #: What comes back to its group later than this is set aside.
    redelivery_horizon_ms: int = 3_600_000
    #: Messages of one group that are set aside; what is over it waits as if it came sooner.
    aside_per_group: int = 1_000_000
    #: Highest `max_attempts` of a group.
    attempts: int = 1_000
    #: Messages and bytes of one pull's answer.
    pull_messages: int = 10_000
    pull_bytes: int = 7 * 1024 * 1024
    #: Ranges in the settlements of one request.
    settlement_ranges: int = 10_000
    #: The action log is synced this often; losing more means redelivery, never loss.
    action_sync_ms: int = 100
    #: Delayed messages in memory: 48 bytes each, for those of the near future and for those that
    #: were overdue at the start.
    delayed_loaded: int = 500_000
    #: A bucket of delayed messages with more than these is sorted on the disk: two portions of a load.
    delayed_unsorted: int = 250_000
    #: Delayed messages released each second that were overdue at the start.
    overdue_per_s: int = 20_000
    #: Groups looked after, and leases ended for each of them, in one pass.
    groups_per_pass: int = 100
    leases_ended_per_pass: int = 1_000

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"limit {name}: {getattr(self, name)}; allowed: 1 or more")
