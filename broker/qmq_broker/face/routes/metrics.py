"""The table of the metrics of `GET /metrics`, and the code that reads their values; docs/metrics.md has the same table.

The labels `subject` and `group` have at most `LISTED_MAX` values each, and `keeper` a few;
`reason`, `state`, `log` and `bound` come from short, fixed lists. No message id, consumer or error text
becomes a label.

A reading consists of plain values, taken in the loop thread; the text is made in another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from qmq_broker.face.logs import dropped_lines
from qmq_broker.service.broker import Broker
from qmq_broker.service.delay.counts import LATE_BOUNDS_MS
from qmq_broker.service.delay.query import DelayStatus
from qmq_broker.service.keeping import KeeperStatus
from qmq_broker.service.metrics import OTHER_SUBJECTS, Histogram, steps_of
from qmq_broker.service.query import LISTED_MAX, GroupStatus, Held
from qmq_broker.service.room import Bound
from qmq_broker.service.serving import Serving
from qmq_client.wire.names import OWN_PREFIX

#: A histogram: how many were at most each bound, and their sum.
Steps = tuple[list[tuple[float, int]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReading:
    """The values of one group; counts are since the start."""

    status: GroupStatus
    given: int
    given_again: int
    leases_ended: int

    @property
    def labels(self) -> tuple[str, str]:
        return self.status.subject, self.status.group


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The numbers of one moment."""

    now_ms: int
    state: Serving
    takes_messages: bool
    reserve_bytes: int
    held: Held
    #: Subject, messages, bytes and requests.
    accepted: list[tuple[str, int, int, int]]
    duplicates: int
    refused: dict[str, int]
    append_s: Steps
    sync_s: Steps
    commit_requests: Steps
    action_sync_s: Steps
    waiting_bytes: int
    waiting_pulls: int
    subjects: int
    bounds: tuple[Bound, ...]
    #: Dead letters in memory, and in files.
    dead_letters_bytes: tuple[int, int]
    groups_count: int
    groups: list[GroupReading]
    delayed: DelayStatus
    delayed_pending: list[tuple[str, int]]
    lost_copies: int
    log_lines_dropped: int
    keepers: list[KeeperStatus]
    late_s: Steps

    @classmethod
    def of(cls, broker: Broker) -> Reading:
        """Read the values of a broker. Call it in the loop thread."""
        metrics, delayed = broker.metrics, broker.delayed.query.status()
        held, serving = broker.query.held(), broker.serving
        reserve_bytes = broker.settings.store.reserve_bytes
        accepted = metrics.intakes.subjects.items()
        now_ms = broker.time.now_ms()
        counts = broker.delayed.releaser.counts
        late = steps_of([bound_ms / 1000 for bound_ms in LATE_BOUNDS_MS], counts.late)
        return cls(
            now_ms=now_ms,
            state=serving.state,
            takes_messages=serving.state is Serving.SERVING and held.free_bytes >= reserve_bytes,
            reserve_bytes=reserve_bytes,
            held=held,
            accepted=[
                (name, one.messages, one.bytes, one.requests)
                for name, one in accepted
                if not name.startswith(OWN_PREFIX)
            ],
            duplicates=metrics.intakes.duplicates,
            refused=dict(metrics.refused),
            append_s=_steps(metrics.append_s),
            sync_s=_steps(metrics.sync_s),
            commit_requests=_steps(metrics.commit_requests),
            action_sync_s=_steps(metrics.action_sync_s),
            waiting_bytes=broker.writer.waiting_bytes,
            waiting_pulls=broker.delivery.waiting.count,
            subjects=broker.query.subjects_count(),
            bounds=broker.room.bounds(),
            dead_letters_bytes=broker.room.dead_letters_bytes(),
            groups_count=broker.query.groups_count(),
            groups=list(_groups(broker, now_ms)),
            delayed=delayed,
            delayed_pending=_bounded(delayed.subjects),
            lost_copies=broker.long_retries.lost_copies,
            log_lines_dropped=dropped_lines(),
            keepers=broker.keeping.statuses(now_ms),
            late_s=(late, counts.late_sum_ms / 1000),
        )


def _steps(histogram: Histogram) -> Steps:
    return histogram.steps(), histogram.sum


def _bounded(counts: dict[str, int]) -> list[tuple[str, int]]:
    """The first subjects one by one, and the rest as one sum."""
    rows = sorted(row for row in counts.items() if not row[0].startswith(OWN_PREFIX))
    rest = sum(count for _, count in rows[LISTED_MAX:])
    return rows[:LISTED_MAX] + ([(OTHER_SUBJECTS, rest)] if rest else [])


def _groups(broker: Broker, now_ms: int) -> Iterator[GroupReading]:
    for status in broker.query.groups(now_ms=now_ms, count=LISTED_MAX):
        group = broker.delivery.registry.find(status.subject, status.group)
        if group is not None:
            yield GroupReading(
                status=status,
                given=group.given,
                given_again=group.given_again,
                leases_ended=group.leases_ended,
            )


#: The values of the labels, and the number.
Rows = Iterable[tuple[tuple[str, ...], float]]
Kind = Literal["counter", "gauge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """The name of one metric."""

    name: str
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMetric(Metric):
    """A metric with one number per set of label values. The name of a counter ends in `_total`."""

    kind: Kind
    labels: tuple[str, ...] = ()
    read: Callable[[Reading], Rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramMetric(Metric):
    """The distribution of values. It has no labels, since each label value would add a row for every bound."""

    kind: Literal["histogram"] = "histogram"
    labels: tuple[()] = ()
    read: Callable[[Reading], Steps]


def _one(name: str, kind: Kind, about: str, read: Callable[[Reading], float]) -> PlainMetric:
    """A number without labels."""
    return PlainMetric(
        name=name, kind=kind, about=about, read=lambda reading: [((), read(reading))]
    )


def _spread(name: str, about: str, read: Callable[[Reading], Steps]) -> HistogramMetric:
    return HistogramMetric(name=name, about=about, read=read)


def _by_log(
    name: str, about: str, commit: Callable[[Held], float], action: Callable[[Held], float]
) -> PlainMetric:
    """A number for each of the two logs."""
    return PlainMetric(
        name=name,
        kind="gauge",
        about=about,
        labels=("log",),
        read=lambda reading: [
            (("commit",), commit(reading.held)),
            (("action",), action(reading.held)),
        ],
    )


def _accepted(name: str, about: str, place: int) -> PlainMetric:
    """By subject."""

    def read(reading: Reading) -> Rows:
        return [((str(row[0]),), float(row[place])) for row in reading.accepted]

    return PlainMetric(name=name, kind="counter", about=about, labels=("subject",), read=read)


def _of_group(
    name: str, kind: Kind, about: str, read: Callable[[GroupReading], float | None]
) -> PlainMetric:
    """By subject and group; a group without a value has no row."""

    def rows(reading: Reading) -> Rows:
        for group in reading.groups:
            if (value := read(group)) is not None:
                yield group.labels, value

    return PlainMetric(
        name=f"group_{name}", kind=kind, about=about, labels=("subject", "group"), read=rows
    )


def _of_keeper(name: str, about: str, read: Callable[[KeeperStatus], float]) -> PlainMetric:
    """By keeper."""

    def rows(reading: Reading) -> Rows:
        return [((one.name,), read(one)) for one in reading.keepers]

    return PlainMetric(
        name=f"keeper_{name}", kind="gauge", about=about, labels=("keeper",), read=rows
    )


#: In the order of docs/metrics.md.
METRICS: Final[tuple[PlainMetric | HistogramMetric, ...]] = (
    PlainMetric(
        name="state",
        kind="gauge",
        about="1 for the broker's current state, 0 for the others.",
        labels=("state",),
        read=lambda reading: [((str(one),), float(one is reading.state)) for one in Serving],
    ),
    _one(
        "takes_messages",
        "gauge",
        "1 if the broker accepts messages: it serves, and the disk has room above the reserve.",
        lambda reading: reading.takes_messages,
    ),
    _accepted("accepted_messages", "Acknowledged messages, including repeats and delayed ones.", 1),
    _accepted("accepted_bytes", "Bytes of their records.", 2),
    _accepted("accepted_requests", "Requests with messages for the subject.", 3),
    _one(
        "duplicates",
        "counter",
        "Repeated messages, answered with the place of the first.",
        lambda reading: reading.duplicates,
    ),
    _one(
        "log_lines_dropped",
        "counter",
        "Log lines that were dropped because earlier ones were not read.",
        lambda reading: reading.log_lines_dropped,
    ),
    _one(
        "remembered_ids",
        "gauge",
        "Message ids remembered to recognize repeats.",
        lambda reading: reading.held.remembered_ids,
    ),
    PlainMetric(
        name="refused_requests",
        kind="counter",
        about="Refused requests, by the code of the answer.",
        labels=("reason",),
        read=lambda reading: [((code,), count) for code, count in sorted(reading.refused.items())],
    ),
    _spread(
        "append_seconds",
        "Time of one commit until the operating system has it.",
        lambda reading: reading.append_s,
    ),
    _spread(
        "sync_seconds",
        "Time of one commit from there until it is on the disk.",
        lambda reading: reading.sync_s,
    ),
    _spread(
        "commit_requests",
        "Requests in one commit.",
        lambda reading: reading.commit_requests,
    ),
    _spread(
        "action_sync_seconds",
        "Time of one sync of the action log.",
        lambda reading: reading.action_sync_s,
    ),
    _one(
        "waiting_bytes",
        "gauge",
        "Bytes of requests that wait for their commit.",
        lambda reading: reading.waiting_bytes,
    ),
    _one(
        "waiting_pulls",
        "gauge",
        "Pulls that wait for messages.",
        lambda reading: reading.waiting_pulls,
    ),
    _by_log(
        "durable_offset_bytes",
        "Offset up to which the log survives a power cut.",
        lambda held: held.durable_offset,
        lambda held: held.durable_actions_offset,
    ),
    _one(
        "first_offset_bytes",
        "gauge",
        "Offset where the commit log begins; everything below was deleted.",
        lambda reading: reading.held.first_offset,
    ),
    _by_log(
        "segments",
        "Files of the log.",
        lambda held: held.segments,
        lambda held: held.action_segments,
    ),
    _of_keeper("age_seconds", "Time since the keeper last reported.", lambda one: one.age_s),
    _of_keeper(
        "lag_bytes",
        "Durable bytes of the commit log that are not kept yet.",
        lambda one: one.lag_bytes,
    ),
    _of_keeper(
        "held_bytes",
        "Bytes that retention would have deleted if it did not wait for the keeper.",
        lambda one: one.held_bytes,
    ),
    _of_keeper(
        "lost_bytes",
        "Bytes of both logs that were deleted by force before they were kept.",
        lambda one: one.lost_bytes + one.lost_actions_bytes,
    ),
    _one(
        "stored_ahead_seconds",
        "gauge",
        "How far the times of stored messages are ahead of the clock.",
        lambda reading: max(0, reading.held.last_stored_at_ms - reading.now_ms) / 1000,
    ),
    _one(
        "disk_free_bytes",
        "gauge",
        "Free space, including the reserve.",
        lambda reading: reading.held.free_bytes,
    ),
    _one(
        "disk_reserve_bytes",
        "gauge",
        "Free space below which sends are refused.",
        lambda reading: reading.reserve_bytes,
    ),
    _one(
        "dead_letters_memory_bytes",
        "gauge",
        "Memory of the most recently used dead letters.",
        lambda reading: reading.dead_letters_bytes[0],
    ),
    _one(
        "dead_letters_file_bytes",
        "gauge",
        "Length of the files that hold the other dead letters while the broker runs.",
        lambda reading: reading.dead_letters_bytes[1],
    ),
    PlainMetric(
        name="bound_used",
        kind="gauge",
        about="Current use of a limit that all clients share.",
        labels=("bound",),
        read=lambda reading: [((one.name,), one.used) for one in reading.bounds],
    ),
    PlainMetric(
        name="bound_limit",
        kind="gauge",
        about="The limit, beyond which the broker refuses requests.",
        labels=("bound",),
        read=lambda reading: [((one.name,), one.limit) for one in reading.bounds],
    ),
    _one("subjects", "gauge", "Subjects.", lambda reading: reading.subjects),
    _one(
        "groups",
        "gauge",
        "Groups; the first 1,000 by name have metrics of their own.",
        lambda reading: reading.groups_count,
    ),
    _of_group(
        "lag_messages",
        "gauge",
        "Messages not yet delivered to the group.",
        lambda one: one.status.lag,
    ),
    _of_group(
        "lag_seconds",
        "gauge",
        "Age of the oldest of them; missing if there is none.",
        lambda one: one.status.lag_s,
    ),
    _of_group(
        "in_flight_messages",
        "gauge",
        "Messages in flight: delivered and not settled.",
        lambda one: one.status.in_flight,
    ),
    _of_group(
        "redelivery_messages",
        "gauge",
        "Messages that wait for their next delivery.",
        lambda one: one.status.redelivery,
    ),
    _of_group(
        "long_retry_messages",
        "gauge",
        "Messages that wait for a long retry, stored as copies.",
        lambda one: one.status.long_retries,
    ),
    _of_group(
        "held_messages",
        "gauge",
        "Messages that wait for an earlier one with the same key.",
        lambda one: one.status.held,
    ),
    _of_group("dead_messages", "gauge", "Dead letters of the group.", lambda one: one.status.dead),
    _of_group(
        "consumers",
        "gauge",
        "Consumers that hold messages or pulled recently.",
        lambda one: one.status.consumers,
    ),
    _of_group("paused", "gauge", "1 while the group is paused.", lambda one: one.status.is_paused),
    _of_group(
        "given_messages", "counter", "Deliveries, including repeated ones.", lambda one: one.given
    ),
    _of_group(
        "redelivered_messages",
        "counter",
        "Deliveries of messages that were tried before.",
        lambda one: one.given_again,
    ),
    _of_group(
        "ended_leases",
        "counter",
        "Messages whose lease ended without a sign of life from the consumer.",
        lambda one: one.leases_ended,
    ),
    _of_group(
        "acked_messages",
        "counter",
        "Messages acked since the group was created.",
        lambda one: one.status.acked,
    ),
    _of_group(
        "expired_messages",
        "counter",
        "Messages that expired before their delivery.",
        lambda one: one.status.expired,
    ),
    _of_group(
        "lost_messages",
        "counter",
        "Messages deleted by force before the group settled them.",
        lambda one: one.status.lost,
    ),
    PlainMetric(
        name="delayed_pending_messages",
        kind="gauge",
        about="Messages that wait for their due time.",
        labels=("subject",),
        read=lambda reading: [((name,), count) for name, count in reading.delayed_pending],
    ),
    _one(
        "delayed_buckets",
        "gauge",
        "Delay buckets (hours) with waiting messages.",
        lambda reading: reading.delayed.buckets,
    ),
    _one(
        "delayed_loaded_messages",
        "gauge",
        "Delayed messages that are in memory.",
        lambda reading: reading.delayed.loaded,
    ),
    _one(
        "delayed_loaded_ahead_seconds",
        "gauge",
        "Messages due within this time are all in memory.",
        lambda reading: max(0, reading.delayed.loaded_until_ms - reading.now_ms) / 1000,
    ),
    _one(
        "delayed_overdue_messages",
        "gauge",
        "Messages in memory that were overdue at the start.",
        lambda reading: reading.delayed.overdue,
    ),
    _one(
        "delayed_released_messages",
        "counter",
        "Messages released into their subjects.",
        lambda reading: reading.delayed.released,
    ),
    _spread(
        "delayed_late_seconds",
        "Time from a message's due time until its release was durable, for messages not overdue at the start.",
        lambda reading: reading.late_s,
    ),
    _one(
        "delayed_damaged_messages",
        "counter",
        "Delayed messages held back because they cannot be read, counted each time one is found.",
        lambda reading: reading.delayed.damaged_total,
    ),
    _one(
        "delayed_held_buckets",
        "gauge",
        "Delay buckets whose messages are held back because their list cannot be read.",
        lambda reading: len(reading.delayed.damaged_buckets),
    ),
    _one(
        "lost_copy_messages",
        "counter",
        "Messages in a long retry whose copy is lost, so that the group got the original, or nothing.",
        lambda reading: reading.lost_copies,
    ),
    _one(
        "delayed_clock_held_messages",
        "gauge",
        "Upper bound of the messages that would have been released if the clock had not been changed.",
        lambda reading: reading.delayed.clock_held,
    ),
    _one(
        "delayed_clock_trouble",
        "gauge",
        "1 while the clock was changed and releases are held or slowed, or the log is ahead of the clock.",
        lambda reading: bool(reading.delayed.clock),
    ),
)
