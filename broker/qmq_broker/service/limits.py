"""Limits of the service, each with its name, unit and reason. Printed at start.

A request over a limit is refused with the name of the limit and a time to try again, so the
broker's memory stays bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

from qmq_client.wire.limits import DEFAULT_LIMITS


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """Limits of the broker's memory and of times."""

    #: Bytes of accepted requests that wait for their commit: one second of a fast disk.
    commit_queue_bytes: int = 64 * 1024 * 1024
    #: If a request waits longer than this for the disk, no more are accepted (RocketMQ's
    #: page-cache-busy check, with the same second).
    commit_queue_age_ms: int = 1_000
    #: Subjects; each costs an open file and a few kilobytes.
    subjects: int = 10_000
    #: Subjects that senders with one token may create.
    subjects_per_token: int = 5_000
    #: Groups over all subjects.
    groups: int = 10_000
    #: Groups that consumers with one token may create.
    groups_per_token: int = 5_000
    #: Memory of all groups together, for messages in flight or waiting, their histories, and dead
    #: letters. Beyond it no group gets new messages.
    groups_bytes: int = 512 * 1024 * 1024
    #: The same for the groups that consumers with one token have created.
    groups_bytes_per_token: int = 256 * 1024 * 1024
    #: Consumers of one group that hold messages or were seen recently.
    consumers_per_group: int = 1_000
    #: If there is no room for another consumer, consumers are forgotten that hold no messages and
    #: gave no sign of life for this long: twice the time that a client waits for an answer.
    #: Otherwise processes that restart under new names would soon be refused.
    consumer_idle_ms: int = 60_000
    #: A broadcast consumer with a made-up name ends after not being seen for this long: five waits
    #: of the longest pull …
    ephemeral_idle_ms: int = 300_000
    #: … and a named one after as long as a dead letter protects its message.
    named_idle_ms: int = 7 * 24 * 3_600_000
    #: Messages that one consumer may hold unsettled.
    in_flight_per_consumer: int = 20_000
    #: Messages of one group that are in flight, wait for redelivery within the horizon, or wait for
    #: earlier messages of their key; beyond it new ones are held back.
    unsettled_per_group: int = 200_000
    #: Length of the dead letters of all groups. They are in files while the broker runs, and twice
    #: in snapshots, so the disk holds up to four times as much while a snapshot is written.
    dead_letters_bytes: int = 4 * 1024 * 1024 * 1024
    #: The same for the groups that consumers with one token have created.
    dead_letters_bytes_per_token: int = 2 * 1024 * 1024 * 1024
    #: Memory of the most recently used dead letters; at most a quarter of `groups_bytes`, of which
    #: it is a part. The others are in files.
    dead_letters_memory_bytes: int = 64 * 1024 * 1024
    #: Dead letters of one group: each takes about 22 bytes of the memory of all groups, even when paged out.
    dead_letters_per_group: int = 10_000_000
    #: A dead letter protects its message from retention for this long.
    dead_letter_ms: int = 7 * 24 * 3_600_000
    #: Pulls that wait for messages, over all groups.
    waiting_pulls: int = 2_000
    #: Longest wait of one pull; below the 60 s after which many proxies give up.
    wait_ms: int = 50_000
    #: Shortest and longest lease.
    lease_ms_min: int = 50
    lease_ms: int = 12 * 3_600_000
    #: Longest time from the delivery to the end of an extended lease.
    held_ms: int = 24 * 3_600_000
    #: Tags of one filter.
    filter_tags: int = 64
    #: Longest backoff of a group.
    backoff_ms: int = 24 * 3_600_000
    #: Dead letters that one request replays or purges.
    dead_letters_per_request: int = 10_000
    #: Longest wait that a nack may ask for: as long as a message may be delayed.
    nack_delay_ms: int = DEFAULT_LIMITS.delay_ms
    #: Redeliveries later than this are long retries.
    redelivery_horizon_ms: int = 3_600_000
    #: Bytes of the records in one frame that the broker makes itself, of releases or of copies for
    #: long retries; a longer record gets a separate frame.
    own_frame_bytes: int = 1024 * 1024
    #: Long retries of one group; the excess waits in the redelivery heap.
    long_retries_per_group: int = 1_000_000
    #: Highest `max_attempts` of a group.
    attempts: int = 1_000
    #: Messages and bytes in the answer to one pull.
    pull_messages: int = 10_000
    pull_bytes: int = 7 * 1024 * 1024
    #: Ranges in the settlements of one request.
    settlement_ranges: int = 10_000
    #: How often the action log is synced; losing later actions means redelivery, never loss.
    action_sync_ms: int = 100
    #: Delayed messages in memory, 48 bytes each: this many of the near future, and this many that
    #: were overdue at the start.
    delayed_loaded: int = 500_000
    #: Larger buckets of delayed messages are sorted on the disk; two portions of a load.
    delayed_unsorted: int = 250_000
    #: Messages overdue at the start that are released each second.
    overdue_per_s: int = 20_000
    #: Groups visited in one pass, and leases ended for each of them.
    groups_per_pass: int = 100
    leases_ended_per_pass: int = 1_000

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"limit {name}: {getattr(self, name)}; allowed: 1 or more")
