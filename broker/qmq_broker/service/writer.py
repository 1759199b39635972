"""The writer: the one thread that changes the store, with one commit for all waiting requests.

Group commit without linger: while one commit is written to the disk, further requests wait for the
next one, so the speed of the disk decides the size of a commit. A commit is one append and one sync; then, in one call
into the loop, each request is answered and the messages become visible. The first failed write or
sync poisons the writer: nothing is acknowledged any more, and every waiting request gets the reason.

`submit` belongs to the loop thread, `run` and `step` to the writer thread (or to a test);
`run_soon`, `change` and `stop` may be called in any thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

import msgspec

from qmq_broker.errors import BusyError, ConflictError, NoRoomError, PoisonedError
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.metrics import Metrics
from qmq_broker.storage.logs.kinds import SENT_KINDS
from qmq_broker.storage.store import Placed, Store
from qmq_client.clock import Clock
from qmq_client.wire.frame import MessageFrame
from qmq_client.wire.message_id import format_message_id

#: Requests of one commit; bounds how long the first of them waits for the last.
REQUESTS_PER_COMMIT_MAX: Final = 1024
#: How long the writer waits for a request before the next step of the store.
IDLE_S: Final = 0.5
#: How long a step of the store may be delayed while requests keep coming: it takes as long as a
#: small commit, and would delay the answers of the next commit each time.
STEP_S: Final = 0.005
_STOP: Final = None
_WAKE: Final = object()

T = TypeVar("T")
#: Called in the loop thread with the outcome of one request.
OnDone = Callable[[Placed | Exception], None]


class _Submission(msgspec.Struct, frozen=True, kw_only=True):
    frame: MessageFrame
    on_done: OnDone


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    work: Callable[[], object]
    on_poisoned: Callable[[PoisonedError], object]


class CommitCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one pass of the writer."""

    requests: int
    messages: int
    is_stopped: bool


class CommitWriter:
    """The writer of one store.

    Life cycle: `run` in a separate thread until `stop`, or `step` by hand. The first failure poisons it permanently.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        limits: ServiceLimits,
        *,
        post: Callable[[Callable[[], None]], object],
        on_visible: Callable[[Iterable[str]], object],
        on_poisoned: Callable[[str], None],
        metrics: Metrics | None = None,
    ) -> None:
        """`post` runs a function in the loop thread; the other two callbacks are called there."""
        self._store = store
        self._clock = clock
        self._limits = limits
        self._post = post
        self._on_visible = on_visible
        self._on_poisoned = on_poisoned
        self._metrics = metrics or Metrics()
        self._submissions: SimpleQueue[_Submission | object | None] = SimpleQueue()
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        #: Submission time and length of each unanswered request, in order.
        self._unanswered: deque[tuple[float, int]] = deque()
        self._poison: PoisonedError | None = None
        #: When the store was last stepped.
        self._stepped_s = clock.monotonic_s()
        self.waiting_bytes = 0

    def submit(self, frame: MessageFrame, on_done: OnDone) -> None:
        """Queue a request for its commit; raises `BusyError` over a bound.

        `on_done` is called in the loop thread: with its places when the request is durable, or with
        the reason why it is not stored.
        """
        if self._poison is not None:
            raise self._poison
        now_s = self._clock.monotonic_s()
        self._check_room(now_s, len(frame.data))
        self._unanswered.append((now_s, len(frame.data)))
        self.waiting_bytes += len(frame.data)
        self._submissions.put(_Submission(frame=frame, on_done=on_done))

    def run_soon(
        self,
        task: Callable[[], object],
        on_poisoned: Callable[[PoisonedError], object] = lambda _: None,
    ) -> None:
        """Run a change of the store in the writer's thread, between two commits or when it is idle.

        If the writer is poisoned, `on_poisoned` is called instead, in the writer's thread.
        """
        self._tasks.put(_Task(work=task, on_poisoned=on_poisoned))
        self._submissions.put(_WAKE)

    def change(
        self,
        work: Callable[[], T],
        on_done: Callable[[T | Exception], None],
        *,
        refusals: tuple[type[Exception], ...] = (),
    ) -> None:
        """Change the store like `run_soon`; the loop thread calls `on_done` with the result or the error.

        Errors in `refusals` do not poison the store; any other error does.
        """

        def answer(outcome: T | Exception) -> None:
            self._post(lambda: on_done(outcome))

        def task() -> None:
            try:
                outcome = work()
            except refusals as refusal:
                answer(refusal)
            except (
                Exception
            ) as error:  # the waiting caller gets the error; `_guarded` decides what it means
                answer(error)
                raise
            else:
                answer(outcome)

        self.run_soon(task, on_poisoned=answer)

    def step(self, *, wait_s: float = 0.0) -> CommitCounts:
        """Commit waiting requests, then step the store; wait up to `wait_s` for a request."""
        counts = self._commit_waiting(wait_s)
        self._step_store()
        return counts

    def run(self) -> None:
        """Commit until `stop`, then commit the requests that still wait.

        The store is stepped, for work that depends on time, when no request follows, or after
        `STEP_S`.
        """
        wait_s, is_stopped = IDLE_S, False
        while not is_stopped:
            counts = self._commit_waiting(wait_s)
            is_stopped = counts.is_stopped
            left_s = STEP_S - (self._clock.monotonic_s() - self._stepped_s)
            is_step_due = left_s <= 0 or not counts.requests or is_stopped
            wait_s = IDLE_S if is_step_due else left_s
            if is_step_due:
                self._step_store()

    def stop(self) -> None:
        """Let `run` end after all submitted requests. Safe to call twice."""
        self._submissions.put(_STOP)

    def _commit_waiting(self, wait_s: float) -> CommitCounts:
        """One commit and one task, so that many tasks do not delay a commit.

        While tasks are left, it does not wait. The last pass, at `stop`, runs all of them.
        """
        submissions, is_stopped = self._gather(wait_s if self._tasks.empty() else 0.0)
        while not self._tasks.empty():
            self._do(self._tasks.get())
            if not is_stopped:
                break
        if submissions:
            outcomes = self._commit([submission.frame for submission in submissions])
            self._post(lambda: self._answer(submissions, outcomes))
        return CommitCounts(
            requests=len(submissions),
            messages=sum(submission.frame.header.record_count for submission in submissions),
            is_stopped=is_stopped,
        )

    def _step_store(self) -> None:
        """Let the store do its time-dependent work."""
        self._stepped_s = self._clock.monotonic_s()
        self._guarded("upkeep", self._store.step)

    def _check_room(self, now_s: float, frame_bytes: int) -> None:
        if not self._unanswered:
            return
        age_ms = (now_s - self._unanswered[0][0]) * 1000
        if age_ms > self._limits.commit_queue_age_ms:
            raise BusyError(
                f"the oldest request has waited {age_ms:.0f} ms for the disk; "
                f"allowed: {self._limits.commit_queue_age_ms} ms",
                retry_after_s=1.0,
                status=503,
            )
        if self.waiting_bytes + frame_bytes > self._limits.commit_queue_bytes:
            raise BusyError(
                f"{self.waiting_bytes} bytes wait for the disk; "
                f"allowed: {self._limits.commit_queue_bytes}",
                retry_after_s=1.0,
                status=503,
            )

    def _gather(self, wait_s: float) -> tuple[list[_Submission], bool]:
        gathered: list[_Submission] = []
        try:
            submission = (
                self._submissions.get(timeout=wait_s) if wait_s else self._submissions.get_nowait()
            )
            while submission is not _STOP:
                if isinstance(submission, _Submission):
                    gathered.append(submission)
                    if len(gathered) == REQUESTS_PER_COMMIT_MAX:
                        return gathered, False
                submission = self._submissions.get_nowait()
        except Empty:
            return gathered, False
        return gathered, True

    def _commit(self, frames: Sequence[MessageFrame]) -> Sequence[Placed | Exception]:
        placed: list[Placed] = []

        def append_and_sync() -> None:
            metrics, clock = self._metrics, self._clock
            metrics.commit_requests.note(len(frames))
            began_s = clock.monotonic_s()
            placed.extend(self._store.append(frames))
            appended_s = clock.monotonic_s()
            self._store.commit()
            metrics.append_s.note(appended_s - began_s)
            metrics.sync_s.note(clock.monotonic_s() - appended_s)

        error = self._guarded("messages", append_and_sync)
        if error is not None:
            return [error] * len(frames)
        return [_outcome(place) for place in placed]

    def _do(self, task: _Task) -> None:
        if self._poison is not None:
            task.on_poisoned(self._poison)
        else:
            self._guarded("tasks", task.work)

    def _guarded(self, name: str, work: Callable[[], object]) -> Exception | None:
        """Work on the store; the first failure, except a lack of room, poisons the writer."""
        if self._poison is not None:
            return self._poison
        try:
            work()
        except NoRoomError as error:
            self._store.refusals.note(name, error)
            return error
        except Exception as error:  # the top of the writer's loop: nothing is acknowledged
            reason = f"{type(error).__name__}: {error}"
            self._poison = PoisonedError(f"a write or sync failed: {reason}")
            self._post(lambda: self._on_poisoned(reason))
            return self._poison
        return None

    def _answer(
        self, submissions: Sequence[_Submission], outcomes: Sequence[Placed | Exception]
    ) -> None:
        subjects: dict[str, None] = {}  # in the order of the log, in which pulls are woken too
        for submission, outcome in zip(submissions, outcomes, strict=True):
            _, frame_bytes = self._unanswered.popleft()
            self.waiting_bytes -= frame_bytes
            if not isinstance(outcome, Exception):
                subjects.update((place.subject, None) for place in outcome.places)
                if submission.frame.header.kind in SENT_KINDS:
                    self._metrics.intakes.note(submission.frame, outcome.duplicates)
            submission.on_done(outcome)
        # After the answers: waking pulls first would gain them 0.1 ms and cost senders 0.7 ms.
        self._on_visible(subjects)


def _outcome(placed: Placed) -> Placed | Exception:
    if placed.conflict is None:
        return placed
    message_id = format_message_id(placed.conflict)
    return ConflictError(
        f"message id {message_id} was stored before with other content",
        remedy="Send changed content with a new id.",
        message_id=message_id,
    )
