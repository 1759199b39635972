"""The numbers of a broker at one moment, read in the loop thread for a scrape.

A reading is plain values: what is made of it is made beside the loop. Subjects and groups have at
most `LISTED_MAX` rows each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qmq_broker.face.logs import dropped_lines
from qmq_broker.service.broker import Broker
from qmq_broker.service.delay.counts import LATE_BOUNDS_MS
from qmq_broker.service.delay.query import DelayStatus
from qmq_broker.service.keeping import KeeperStatus
from qmq_broker.service.measures import OTHER_SUBJECTS, Histogram, steps_of
from qmq_broker.service.query import LISTED_MAX, GroupStatus, Held
from qmq_broker.service.serving import Serving
from qmq_client.wire.names import OWN_PREFIX

#: A histogram: how many were at most each bound, and their sum.
Steps = tuple[list[tuple[float, int]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReading:
    """One group and what it was given since the start."""

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
        """Read a broker; for the loop thread."""
        measures, delayed = broker.measures, broker.delayed.query.status()
        held, serving = broker.query.held(), broker.serving
        reserve_bytes = broker.settings.store.reserve_bytes
        accepted = measures.intakes.subjects.items()
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
            duplicates=measures.intakes.duplicates,
            refused=dict(measures.refused),
            append_s=_steps(measures.append_s),
            sync_s=_steps(measures.sync_s),
            commit_requests=_steps(measures.commit_requests),
            action_sync_s=_steps(measures.action_sync_s),
            waiting_bytes=broker.writer.waiting_bytes,
            waiting_pulls=broker.delivery.waiting.count,
            subjects=broker.query.subjects_count(),
            groups_count=broker.query.groups_count(),
            groups=list(_groups(broker, now_ms)),
            delayed=delayed,
            delayed_pending=_bounded(delayed.subjects),
            lost_copies=broker.setting_aside.lost_copies,
            log_lines_dropped=dropped_lines(),
            keepers=broker.keeping.statuses(now_ms),
            late_s=(late, counts.late_sum_ms / 1000),
        )


def _steps(histogram: Histogram) -> Steps:
    return histogram.steps(), histogram.sum


def _bounded(counts: dict[str, int]) -> list[tuple[str, int]]:
    """The first subjects, and the rest together."""
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
