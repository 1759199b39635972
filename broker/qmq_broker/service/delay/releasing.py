"""The release of delayed messages at their due time, and the clock for it.

A separate thread reads due messages, makes RELEASED frames of them and submits them to the writer.
The writer commits them with all other requests, and only the writer decides whether a message may
still be released. So this code need not be exact: the writer leaves out messages that are submitted
twice or were cancelled meanwhile, and failed releases are repeated.

Messages that were overdue when the broker started go first, at a bounded rate, and do not delay
those that are due now. A full disk holds back all releases; a damaged message is skipped and
reported. `near.py` holds the messages in memory and loads them.

`DelayClock` is the wall clock without its jumps. If the wall clock is set back, this time is set
back too, so that no message is early; the writer ensures that none is released twice. If the wall
clock is set forward beyond any earlier time, or the machine slept, this time moves by `STEP_MS` at
once and then runs `CATCH_UP` times as fast. So a clock that is wrong by a day releases at first
only messages that are due within a minute. An alarm lasts until the two agree again, or an operator
accepts the clock. Slow drift is followed without an alarm, because then the wall clock is right.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from qmq_broker.errors import CorruptionError
from qmq_broker.service.delay.counts import DelayCounts
from qmq_broker.service.delay.damage import Damage
from qmq_broker.service.delay.near import NearFuture
from qmq_broker.service.delay.rows import Rows
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.writer import CommitWriter
from qmq_broker.storage.refusals import Refusals
from qmq_broker.storage.schedule.schedule import Arrival, Schedule, marked_frame
from qmq_broker.storage.store import Placed
from qmq_client.clock import Clock
from qmq_client.wire.frame import FrameKind, MessageFrame
from qmq_client.wire.limits import SUBJECTS_PER_FRAME_MAX
from qmq_client.wire.marks import Marks
from qmq_client.wire.message_id import format_message_id

#: More than any correction of a well-kept clock, and more than a short sleep of the machine.
STEP_MS: Final = 60_000
#: At this rate ten hours of sleep are caught up with in one hour.
CATCH_UP: Final = 10
#: A smaller distance from the wall clock raises no alarm.
ALARM_MS: Final = 1_000


class DelayClock:
    """Milliseconds since 1970 UTC that never jump far ahead. For one thread, except `accept`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steady_s = clock.monotonic_s()
        #: The highest value of this time so far.
        self._reached_ms = float(clock.now_ms())
        #: How far this time may still jump, in addition to the elapsed time.
        self._budget_ms = float(STEP_MS)
        #: How far the wall clock is ahead of the reached time; negative if it was set back.
        self.ahead_ms = 0
        #: The time if the clock had not been changed; the later of the two possible values.
        self.latest_ms = int(self._reached_ms)
        self._is_alarmed = False
        self._is_accepted = False

    def now_ms(self) -> int:
        """The time. Call it often, at least every few seconds."""
        steady_s = self._clock.monotonic_s()
        passed_ms = (steady_s - self._steady_s) * 1000
        self._steady_s = steady_s
        wall_ms = self._clock.now_ms()
        if self._is_accepted:
            self._is_accepted = False
            self._reached_ms, self.latest_ms, passed_ms = float(wall_ms), 0, 0.0
        refilled_ms = self._budget_ms + passed_ms * (CATCH_UP - 1)
        self._budget_ms = min(float(STEP_MS), refilled_ms)
        wanted_ms = max(self._reached_ms, float(wall_ms))
        jump_ms = wanted_ms - self._reached_ms - passed_ms
        if jump_ms > self._budget_ms:
            wanted_ms -= jump_ms - self._budget_ms
            jump_ms = self._budget_ms
        self._budget_ms -= max(0.0, jump_ms)
        self._reached_ms = wanted_ms
        self.ahead_ms = round(wall_ms - wanted_ms)
        is_back = self.ahead_ms < -ALARM_MS
        self.latest_ms = max(wall_ms, int(self.latest_ms + passed_ms) if is_back else 0)
        self._alarm()
        return min(int(wanted_ms), wall_ms)

    def accept(self) -> None:
        """Accept the clock, as a start does. In any thread; takes effect in the next `now_ms`."""
        self._is_accepted = True

    @property
    def alarm(self) -> str:
        """The current fault of the clock; empty without one."""
        if self.ahead_ms > ALARM_MS:
            return f"the clock was set forward: {self.ahead_ms} ms are being caught up with"
        if self.ahead_ms < -ALARM_MS:
            return (
                f"the clock was set back: messages delayed before wait {-self.ahead_ms} ms longer"
            )
        return ""

    def _alarm(self) -> None:
        alarm = self.alarm
        if alarm and not self._is_alarmed:
            _log.warning("clock jumped: ahead_ms=%d; %s", self.ahead_ms, alarm)
        elif self._is_alarmed and not alarm:
            _log.warning("clock is right again: delayed messages are released in time")
        self._is_alarmed = bool(alarm)


@dataclass(slots=True, kw_only=True, eq=False)
class Release:
    """One frame and the messages in it."""

    frame: MessageFrame
    #: In the order of their records.
    messages: Rows
    is_overdue: bool


class ReleaseFrames:
    """Makes the release frames of one broker, in the thread that releases."""

    def __init__(self, schedule: Schedule, counts: DelayCounts, damage: Damage) -> None:
        """`counts` and `damage` record unreadable messages."""
        self._schedule = schedule
        self._counts = counts
        self._damage = damage

    def make(self, taken: Rows, is_overdue: bool) -> list[Release]:
        """Frames of these messages: of one bucket each, and of as many subjects as fit.

        Unreadable messages are recorded and left out. Requires: together they fit a frame.
        """
        releases: list[Release] = []
        for indexes in _indexes_by(taken.buckets).values():
            messages = taken if len(indexes) == len(taken) else taken.picked(indexes)
            for part in _portions(messages):
                release = self._release(part, is_overdue)
                if release is not None:
                    releases.append(release)
        return releases

    def _release(self, messages: Rows, is_overdue: bool) -> Release | None:
        """A frame of the readable messages of these, all of one bucket; None if there are none."""
        bucket = messages.buckets[0]
        records: dict[str, list[bytes]] = {}
        order: list[int] = []
        for number, indexes in _indexes_by(messages.subjects).items():
            subject = self._schedule.subjects.names[number]
            found = self._schedule.records.read_all(bucket, subject, messages, indexes)
            whole: list[bytes] = []
            for index in indexes:
                record = found[index]
                if isinstance(record, CorruptionError):
                    self._note_damaged(bucket, messages.sequences[index], record)
                else:
                    whole.append(record)
                    order.append(index)
            if whole:
                records[subject] = whole
        if not order:
            return None
        in_order = messages if order == list(range(len(messages))) else messages.picked(order)
        marks = Marks(buckets=(bucket,), sequences=in_order.sequences, sources=in_order.sources)
        frame = marked_frame(FrameKind.RELEASED, records, marks)
        return Release(frame=frame, messages=in_order, is_overdue=is_overdue)

    def _note_damaged(self, bucket: int, sequence: int, error: CorruptionError) -> None:
        named = None
        with suppress(CorruptionError):  # the whole bucket is damaged
            named = self._schedule.message(bucket, sequence)
        self._counts.note_damaged(bucket, named)
        name = "unknown" if named is None else format_message_id(named.message_id)
        self._damage.hold_message(bucket, name, error)


def _indexes_by(column: Sequence[int]) -> dict[int, Sequence[int]]:
    """The indexes for each value of a column; mostly there is a single value."""
    if column.count(column[0]) == len(column):
        return {column[0]: range(len(column))}
    indexes: dict[int, list[int]] = {}
    for index, value in enumerate(column):
        indexes.setdefault(value, []).append(index)
    return dict(indexes)


def _portions(messages: Rows) -> Iterator[Rows]:
    """These messages in parts whose subjects fit a frame; mostly one."""
    first = 0
    subjects: set[int] = set()
    for index, subject in enumerate(messages.subjects):
        subjects.add(subject)
        if len(subjects) > SUBJECTS_PER_FRAME_MAX:
            yield messages.part(first, index)
            first, subjects = index, {subject}
    yield messages.part(first, len(messages))


_log = logging.getLogger(__name__)
#: Messages of one RELEASED frame: enough to be efficient, few enough to be quick.
RELEASE_MAX: Final = 2_000
#: Frames that may wait for their commit.
IN_FLIGHT_MAX: Final = 4
#: Longest sleep: the clock is checked this often, so that a jump is noticed.
SLEEP_S: Final = 0.5
#: Sleep while overdue messages wait.
OVERDUE_S: Final = 0.01
#: During a commit, messages due within this span are released together: a third less work.
GATHER_S: Final = 0.01
#: How long to wait after the writer refused a release.
PAUSE_S: Final = 1.0


class Releaser:
    """The releases of one broker.

    Life cycle: `begin`, then `run` in a thread of its own until `stop`, or `step` by hand.
    """

    def __init__(
        self,
        schedule: Schedule,
        writer: CommitWriter,
        clock: Clock,
        limits: ServiceLimits,
        *,
        post: Callable[[Callable[[], None]], object],
        refusals: Refusals,
    ) -> None:
        """`post` runs a function in the loop thread."""
        self._refusals = refusals
        self.counts = DelayCounts()
        #: Unreadable buckets, or parts of them; held until `look_again` or a restart.
        self.damage = Damage()
        #: Every readable message due before this was released. Read by any thread.
        self.released_until_ms = 0
        self.time = DelayClock(clock)
        #: The messages in memory.
        self.near = NearFuture(schedule, clock, limits, self.damage)
        self._writer = writer
        self._clock = clock
        self._post = post
        self._frames = ReleaseFrames(schedule, self.counts, self.damage)
        self._frame_bytes_max = limits.own_frame_bytes
        #: Arrivals and commits since the last step; guarded by the condition.
        self._arrivals: deque[Arrival] = deque()
        self._done: deque[tuple[Release, Placed | Exception, float]] = deque()
        #: Buckets to be read again; guarded by the condition.
        self._again: set[int] = set()
        self._changed = threading.Condition()
        self._is_stopped = False
        self._in_flight: set[Release] = set()
        #: Messages that were taken and not released: they did not fit a frame, or were refused.
        self._held: deque[tuple[Rows, bool]] = deque()
        self._paused_until_s = 0.0
        #: How many overdue messages may be released now, as of that time.
        self._overdue_per_s = limits.overdue_per_s
        self._overdue_room = float(limits.overdue_per_s)
        self._overdue_s = 0.0
        schedule.on_arrivals = self._on_arrivals

    def begin(self) -> None:
        """Load all pending messages, of any age. Call once, before all other methods."""
        self._overdue_s = self._clock.monotonic_s()
        self.near.begin(self.time.now_ms())

    @property
    def is_busy(self) -> bool:
        """Whether a release has no outcome yet, or a load is under way."""
        return bool(self._in_flight or self._done or self._held or self.near.is_loading)

    def step(self) -> float:
        """Release due messages, as far as there is room; returns the seconds until the next call."""
        now_ms, now_s = self.time.now_ms(), self._clock.monotonic_s()
        self._take_note(now_ms, now_s)
        self._read_again(now_ms)
        self.near.load(now_ms)
        self.released_until_ms = self._released_until(now_ms)
        if now_s < self._paused_until_s:
            return self._paused_until_s - now_s
        while len(self._in_flight) < IN_FLIGHT_MAX:
            taken, is_overdue = self._take_frameful(now_ms, now_s)
            if not len(taken):
                return self._wait_s(now_ms)
            try:
                releases = self._frames.make(taken, is_overdue)
            except Exception:  # these were not submitted, and must be kept
                self._held.append((taken, is_overdue))
                raise
            for release in releases:
                self._submit(release)
        return SLEEP_S  # woken by the next commit

    def run(self) -> None:
        """Release until `stop`."""
        while True:
            try:
                wait_s = self.step()
            except (
                Exception
            ) as error:  # the top of this thread: it continues after an error, like the others
                _log.exception("releases failed: error=%s", error)
                wait_s = PAUSE_S
            with self._changed:
                if self._in_flight:
                    self._changed.wait_for(lambda: self._is_stopped, GATHER_S)
                if not (self._is_stopped or self.has_news):
                    self._changed.wait(min(wait_s, SLEEP_S))
                if self._is_stopped:
                    break
        self.near.close()

    @property
    def has_news(self) -> bool:
        """Whether messages arrived or releases were committed since the last step."""
        return bool(self._arrivals or self._done)

    def look_again(self, buckets: Iterable[int]) -> None:
        """Read these buckets again, and release their readable messages. In any thread.

        Messages that fell due meanwhile are treated as if they had been overdue at a start.
        """
        with self._changed:
            self._again.update(buckets)
            self._changed.notify_all()

    def accept_clock(self) -> None:
        """Release by the current clock and forget its earlier changes. In any thread."""
        with self._changed:
            self.time.accept()
            self._changed.notify_all()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called. In any thread."""
        return self._is_stopped

    def stop(self) -> None:
        """Let `run` end. Safe to call twice."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _on_arrivals(self, arrivals: Sequence[Arrival]) -> None:
        """In the writer's thread."""
        with self._changed:
            self._arrivals.extend(arrivals)
            self._changed.notify_all()

    def _take_note(self, now_ms: int, now_s: float) -> None:
        with self._changed:
            arrivals, self._arrivals = self._arrivals, deque()
            done, self._done = self._done, deque()
        for release, outcome, done_s in done:
            self._in_flight.discard(release)
            if isinstance(outcome, Exception):
                self._hold(release, outcome, now_s)
            else:
                self._settle(release, outcome, now_ms - round((now_s - done_s) * 1000))
        for arrival in arrivals:
            self.near.arrive(arrival)

    def _hold(self, release: Release, refusal: Exception, now_s: float) -> None:
        self._held.append((release.messages, release.is_overdue))
        if now_s >= self._paused_until_s:  # frames submitted together with it are not reported
            self._refusals.note("releases", refusal)
        self._paused_until_s = now_s + PAUSE_S

    def _settle(self, release: Release, placed: Placed, done_ms: int) -> None:
        released = sum(place.count for place in placed.places)
        self.counts.commits += 1
        self.counts.released += released
        self.counts.passed_over += len(release.messages) - released
        if not release.is_overdue:
            self.counts.note_late([done_ms - due_ms for due_ms in release.messages.due_at_ms])

    def _read_again(self, now_ms: int) -> None:
        """Forget the damage of the buckets to be read again, once nothing is overdue."""
        if not self._again or self.near.is_loading or self.near.has_overdue:
            return
        with self._changed:
            again, self._again = self._again, set()
        for bucket in again:
            self.damage.forget(bucket)
            self.counts.forget_damaged(bucket)
        self.near.read_again(again, now_ms)

    def _take_frameful(self, now_ms: int, now_s: float) -> tuple[Rows, bool]:
        """As many of the next messages as fit one frame: two thousand large ones would not fit in memory."""
        taken, is_overdue = self._take(now_ms, now_s)
        ends = accumulate(taken.record_bytes)
        count = max(1, sum(end <= self._frame_bytes_max for end in ends))
        if count < len(taken):
            self._held.appendleft((taken.part(count, len(taken)), is_overdue))
            taken = taken.part(0, count)
        return taken, is_overdue

    def _take(self, now_ms: int, now_s: float) -> tuple[Rows, bool]:
        """The next messages to release: earlier unreleased ones, then those overdue at the start,
        then those due now.
        """
        if self._held:
            return self._held.popleft()
        per_s = self._overdue_per_s
        room = self._overdue_room + (now_s - self._overdue_s) * per_s
        self._overdue_room = min(room, float(per_s))
        self._overdue_s = now_s
        if self.near.overdue and self._overdue_room >= 1:
            taken = self.near.take_overdue(now_ms, min(RELEASE_MAX, int(self._overdue_room)))
            self._overdue_room -= len(taken)
            return taken, True
        return self.near.take_due(now_ms, RELEASE_MAX), False

    def _released_until(self, now_ms: int) -> int:
        if self.near.has_overdue:
            return 0
        firsts = [now_ms, self.near.loaded_until_ms]
        firsts += [min(release.messages.due_at_ms) for release in self._in_flight]
        firsts += [min(held.due_at_ms) for held, _ in self._held]
        next_ms = self.near.next_due_ms()
        return min(firsts) if next_ms is None else min(*firsts, next_ms)

    def _wait_s(self, now_ms: int) -> float:
        if self.near.is_loading:
            return 0.0
        if self.near.has_overdue:
            return OVERDUE_S
        next_ms = self.near.next_due_ms()
        return SLEEP_S if next_ms is None else max(0.0, (next_ms - now_ms) / 1000)

    def _submit(self, release: Release) -> None:
        self._in_flight.add(release)
        self._post(lambda: self._submit_in_loop(release))

    def _submit_in_loop(self, release: Release) -> None:
        def on_done(outcome: Placed | Exception) -> None:
            with self._changed:
                self._done.append((release, outcome, self._clock.monotonic_s()))
                self._changed.notify_all()

        try:
            self._writer.submit(release.frame, on_done)
        except Exception as error:  # refused for now, or closed: the releasing thread decides
            on_done(error)
