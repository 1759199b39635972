"""The threads of the watchdog: fair, bounded, and never all of them at what hangs. No clock, no SQL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from qmq_watchdog.workers import RUNS_PER_SERVER_ISOLATED, SERVER_FAILURES_MAX, Workers
from tests.kit.waiting import wait_for
from tests.watchdog.transports import HandClock

DEADLINE_S = 60.0
SLOW_S = 2.0


@dataclass(eq=False)
class Task:
    """A job that says when it runs and does what its test wants."""

    name: str
    server: str = ""
    is_well: bool = True
    hangs: bool = False
    runs: int = 0
    let_go: threading.Event = field(default_factory=threading.Event)
    started: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __post_init__(self) -> None:
        self.server = self.server or self.name


class Round:
    """Workers over tasks, and the order in which they ran."""

    def __init__(self, *, threads: int = 2, isolated_max: int = 3) -> None:
        self.clock = HandClock()
        self.order: list[str] = []
        self.most_at_once: dict[str, int] = {}
        self._at_once: dict[str, int] = {}
        self._lock = threading.Lock()
        self.workers: Workers[Task] = Workers(
            self._run, threads=threads, isolated_max=isolated_max, slow_s=SLOW_S, clock=self.clock
        )
        self.on_run: Callable[[Task], None] = lambda _: None

    def _run(self, task: Task) -> bool:
        with self._lock:
            task.runs += 1
            self.order.append(task.name)
            for key in (task.server, "all"):
                self._at_once[key] = self._at_once.get(key, 0) + 1
                self.most_at_once[key] = max(self.most_at_once.get(key, 0), self._at_once[key])
        task.started.release()
        self.on_run(task)
        if task.hangs:
            assert task.let_go.wait(DEADLINE_S)
        with self._lock:
            for key in (task.server, "all"):
                self._at_once[key] -= 1
        return task.is_well

    def offer(self, *tasks: Task) -> None:
        for task in tasks:
            self.workers.offer(task)

    def do(self, *tasks: Task) -> None:
        """Offer and wait until all have run."""
        self.offer(*tasks)
        assert self.workers.wait_idle(DEADLINE_S)

    def pass_time(self) -> None:
        """Whatever runs now turns out to be slow."""
        self.clock.elapsed_s += SLOW_S
        self.workers.look()


@contextmanager
def a_round(**arguments: int) -> Iterator[Round]:
    made = Round(**arguments)
    try:
        yield made
    finally:
        made.workers.stop()


def hanging(count: int, *, server: str = "") -> list[Task]:
    return [Task(f"hanging-{number}", server, hangs=True) for number in range(count)]


def started(*tasks: Task) -> None:
    assert all(task.started.acquire(timeout=DEADLINE_S) for task in tasks)


def test_jobs_run_in_the_order_in_which_they_came() -> None:
    with a_round(threads=1) as round_:
        round_.do(*[Task(name) for name in "abcdef"])
        assert round_.order == list("abcdef")


def test_W3_a_job_with_more_to_do_goes_to_the_end_of_the_line() -> None:
    with a_round(threads=1) as round_:
        busy, left = Task("busy", hangs=True), [3]
        others = [Task(name) for name in "abc"]

        def again(task: Task) -> None:
            if task is busy and left[0]:
                left[0] -= 1
                round_.workers.offer(busy)

        round_.on_run = again
        busy.hangs = False
        gate = Task("gate", hangs=True)
        round_.offer(gate, busy, *others)
        gate.let_go.set()
        assert round_.workers.wait_idle(DEADLINE_S)
        assert round_.order == ["gate", "busy", "a", "b", "c", "busy", "busy", "busy"]


def test_no_job_runs_twice_at_once() -> None:
    with a_round(threads=4) as round_:
        task = Task("one", hangs=True)
        round_.offer(task)
        started(task)
        round_.offer(task, task)
        task.let_go.set()
        assert round_.workers.wait_idle(DEADLINE_S)
        assert (task.runs, round_.most_at_once["one"]) == (2, 1)


def test_a_job_that_waits_already_is_not_put_into_the_line_again() -> None:
    """Given up while it waits for a thread, a database is offered once more, to be closed."""
    with a_round(threads=2) as round_:
        blockers, task = hanging(2), Task("one", hangs=True)
        round_.offer(*blockers)
        started(*blockers)
        round_.offer(task, task)
        assert round_.workers.under_way() == (2, 0, 1)
        for each in (*blockers, task):
            each.let_go.set()
        assert round_.workers.wait_idle(DEADLINE_S)
        assert (task.runs, round_.most_at_once["one"]) == (1, 1)
        others = hanging(2, server="others")
        round_.offer(*others)
        started(*others)  # both threads are still there
        for each in others:
            each.let_go.set()
        assert round_.workers.wait_idle(DEADLINE_S)


def test_never_more_run_at_once_than_there_are_threads() -> None:
    with a_round(threads=2) as round_:
        tasks = hanging(6)
        round_.offer(*tasks)
        started(*tasks[:2])
        assert round_.workers.under_way() == (2, 0, 4)
        for task in tasks:
            task.let_go.set()
        assert round_.workers.wait_idle(DEADLINE_S)
        assert round_.most_at_once["all"] == 2


def test_W3_jobs_that_hang_are_counted_apart_and_others_take_their_places() -> None:
    with a_round(threads=2, isolated_max=3) as round_:
        bad, good = hanging(2), [Task(f"good-{number}") for number in range(20)]
        round_.offer(*bad)
        started(*bad)
        round_.offer(*good)
        assert all(task.runs == 0 for task in good), "both threads hang, and nobody knows yet"
        round_.pass_time()
        started(*good)
        wait_for(lambda: round_.workers.under_way() == (0, 2, 0))
        for task in bad:
            task.let_go.set()
        assert round_.workers.wait_idle(DEADLINE_S)


def test_W3_what_has_hung_once_takes_no_thread_of_the_others_again() -> None:
    with a_round(threads=2, isolated_max=1) as round_:
        bad = hanging(2)
        round_.offer(*bad)
        started(*bad)
        round_.pass_time()
        for task in bad:
            task.let_go.set()
        assert round_.workers.wait_idle(DEADLINE_S)
        for task in bad:
            task.let_go.clear()
        round_.offer(*bad)
        started(bad[0])
        good = [Task(f"good-{number}") for number in range(5)]
        round_.offer(*good)
        started(*good)
        wait_for(
            lambda: round_.workers.under_way() == (0, 1, 1),
            "one is not set aside, or the other does not wait for its place",
        )
        for task in bad:
            task.let_go.set()
        assert round_.workers.wait_idle(DEADLINE_S)


def test_W3_what_has_failed_and_is_well_again_waits_for_nothing_that_hangs() -> None:
    with a_round(threads=1, isolated_max=1) as round_:
        once, (stuck,) = Task("once", is_well=False), hanging(1)
        round_.do(once)
        once.is_well = True
        round_.do(once)  # among those aside, where it shows that it is well
        started(once, once)
        round_.offer(stuck)
        started(stuck)
        round_.pass_time()  # the one place aside is taken
        round_.offer(once)
        started(once)
        stuck.let_go.set()


def test_W3_a_hundred_databases_of_a_dead_server_hold_two_threads() -> None:
    with a_round(threads=2, isolated_max=6) as round_:
        dead = [Task(f"dead-{number}", "server", is_well=False) for number in range(100)]
        round_.do(*dead[:SERVER_FAILURES_MAX])
        for task in dead:
            task.hangs = True
        round_.most_at_once.clear()
        round_.offer(*dead)
        started(dead[0])
        good = [Task(f"good-{number}") for number in range(20)]
        round_.offer(*good)
        started(*good)
        aside = (RUNS_PER_SERVER_ISOLATED, 100 - RUNS_PER_SERVER_ISOLATED)
        wait_for(lambda: round_.workers.under_way()[1:] == aside)
        for task in dead:
            task.let_go.set()
        assert round_.workers.wait_idle(DEADLINE_S)
        assert round_.most_at_once["server"] == RUNS_PER_SERVER_ISOLATED


def test_W3_a_server_that_is_back_is_swept_by_all_threads_at_once() -> None:
    with a_round(threads=4, isolated_max=2) as round_:
        dead = [Task(f"dead-{number}", "server", is_well=False) for number in range(10)]
        round_.do(*dead)
        for task in dead:
            task.is_well = True
        round_.do(dead[0])
        siblings = [Task(f"sibling-{number}", "server", hangs=True) for number in range(4)]
        round_.offer(*siblings)
        started(*siblings)
        assert round_.workers.under_way() == (4, 0, 0)
        for task in siblings:
            task.let_go.set()
        assert round_.workers.wait_idle(DEADLINE_S)


def test_a_bad_database_does_not_make_its_healthy_server_a_bad_one() -> None:
    with a_round(threads=1, isolated_max=1) as round_:
        bad = Task("bad", "server", is_well=False)
        good = Task("good", "server")
        for _ in range(SERVER_FAILURES_MAX + 1):
            round_.do(bad)
            round_.do(good)
        blocker = Task("blocker", "other", is_well=False, hangs=True)
        blocker.hangs = False
        round_.do(blocker)
        blocker.hangs = True
        round_.offer(blocker)  # takes the only place aside
        started(blocker)
        good.started = threading.Semaphore(0)
        round_.offer(good)
        started(good)
        blocker.let_go.set()
        assert round_.workers.wait_idle(DEADLINE_S)


def test_stop_drops_what_waits_and_lets_end_what_runs() -> None:
    with a_round(threads=1) as round_:
        task, waiting = Task("one", hangs=True), Task("waiting")
        round_.offer(task)
        started(task)
        round_.offer(waiting)
        round_.workers.stop()
        assert not round_.workers.wait_idle(0.01)
        task.let_go.set()
        assert round_.workers.wait_idle(DEADLINE_S)
        round_.offer(waiting)
        assert (task.runs, waiting.runs) == (1, 0)


def test_a_job_that_was_wanted_again_does_not_come_again_after_a_stop() -> None:
    with a_round(threads=1) as round_:
        task = Task("one", hangs=True)
        round_.offer(task)
        started(task)
        round_.offer(task)
        round_.workers.stop()
        task.let_go.set()
        assert round_.workers.wait_idle(DEADLINE_S)
        assert task.runs == 1


def test_W3_a_job_that_is_given_up_leaves_no_suspicion_to_another_of_its_name() -> None:
    with a_round(threads=1, isolated_max=1) as round_:
        bad, (stuck,) = Task("shop", "old server", is_well=False), hanging(1)
        round_.do(bad)
        round_.workers.forget(bad)
        round_.offer(stuck)
        started(stuck)
        round_.pass_time()  # the one place aside is taken
        good = Task("shop", "new server")
        round_.offer(good)
        started(good)
        stuck.let_go.set()


def refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_W1_jobs_wait_for_a_thread_that_the_system_does_not_give_and_run_when_it_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with a_round(threads=2, isolated_max=1) as round_:
        tasks = [Task(name) for name in "abcdef"]
        with monkeypatch.context() as without_threads:
            without_threads.setattr(threading.Thread, "start", refuse)
            round_.offer(*tasks)
            round_.workers.look()
        assert round_.workers.under_way() == (0, 0, len(tasks))
        assert caplog.text.count("thread.refused") == 1
        round_.workers.look()
        started(*tasks)
        assert round_.workers.wait_idle(DEADLINE_S)


def test_each_lack_of_threads_is_reported_also_if_the_one_before_was_got_over_without_a_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with a_round(threads=2, isolated_max=2) as round_:
        (first,), second, more = hanging(1), Task("second"), hanging(3)
        round_.offer(first)
        started(first)
        with monkeypatch.context() as without_threads:
            without_threads.setattr(threading.Thread, "start", refuse)
            round_.offer(second)
        first.let_go.set()
        wait_for(lambda: round_.order == ["hanging-0", "second"] and round_.workers._idle_count)
        round_.workers.look()
        with monkeypatch.context() as without_threads:
            without_threads.setattr(threading.Thread, "start", refuse)
            round_.offer(*more)
        assert caplog.text.count("thread.refused") == 2
        for task in more:
            task.let_go.set()
        assert round_.workers.wait_idle(DEADLINE_S)


def test_W3_a_thread_that_was_refused_takes_the_place_of_one_that_hangs_when_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with a_round(threads=1, isolated_max=1) as round_:
        (bad,), good = hanging(1), Task("good")
        round_.offer(bad)
        started(bad)
        with monkeypatch.context() as without_threads:
            without_threads.setattr(threading.Thread, "start", refuse)
            round_.offer(good)
            round_.pass_time()
        assert round_.workers.under_way() == (0, 1, 1)
        round_.workers.look()
        started(good)
        bad.let_go.set()
        assert round_.workers.wait_idle(DEADLINE_S)
