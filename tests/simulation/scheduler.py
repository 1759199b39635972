"""Played time and the turns of everybody in it: one thread, one heap of events, one seed.

Whatever may block in the real world (a request, a sync, a lock of the database, a sleep) is a point
at which a *strand* of a process gives its turn back. Strands are greenlets, so the product's blocking
calls stay as they are, and no two of them ever run at once. Who is next is drawn from the seed: equal
times are put in an order of their own, and every wait has a length of its own.

A process dies at such a point, too: from then on each of its points raises `Died`, so that whatever its
`finally` blocks still try reaches nobody.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, NoReturn

from greenlet import getcurrent, greenlet

#: Microseconds of a millisecond; all times inside are whole microseconds.
MS: Final = 1_000
#: A world that takes more turns than this runs in a circle.
TURNS_MAX: Final = 400_000


class Died(BaseException):
    """This process is gone. Not an `Exception`: nobody may take it for an error and go on."""


class StuckError(AssertionError):
    """Time passed, or turns, and what was waited for did not come."""


@dataclass(slots=True, eq=False)
class Turn:
    """Something that happens at a time unless it is called off."""

    name: str
    call: Callable[[], None]
    is_off: bool = False


@dataclass(slots=True, eq=False)
class Signal:
    """What strands wait for; whoever waits when it is given gets his turn."""

    waiting: list[Turn] = field(default_factory=list)


class Scheduler:
    """The only owner of time. Everything is called from one thread."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_us = 0
        self.turns = 0
        #: (time, name) of each turn taken, and of each thing noted; what a failing seed shows.
        self.steps: list[tuple[int, str]] = []
        self._heap: list[tuple[int, float, int, Turn]] = []
        self._count = 0
        self._hub = getcurrent()

    def after(self, delay_us: int, name: str, call: Callable[[], None]) -> Turn:
        """Let this happen so long from now."""
        turn = Turn(name, call)
        self._count += 1
        entry = (self.now_us + max(0, delay_us), self.rng.random(), self._count, turn)
        heappush(self._heap, entry)
        return turn

    def note(self, name: str) -> None:
        """Write down that something happened now."""
        self.steps.append((self.now_us, name))

    def run(self, is_over: Callable[[], bool], *, for_us: int) -> None:
        """Take turns until `is_over`; raises `StuckError` when it takes longer than `for_us`."""
        end_us = self.now_us + for_us
        while not is_over():
            if not self._heap or self._heap[0][0] > end_us or self.turns > TURNS_MAX:
                raise StuckError(f"not over after {for_us // MS} ms and {self.turns} turns")
            at_us, _, _, turn = heappop(self._heap)
            if turn.is_off:
                continue
            self.now_us = max(self.now_us, at_us)
            self.turns += 1
            self.steps.append((self.now_us, turn.name))
            turn.call()

    def run_for(self, for_us: int) -> None:
        """Take all turns of the next `for_us`."""
        is_there: list[bool] = []
        self.after(for_us, "world: time is up", lambda: is_there.append(True))
        self.run(lambda: bool(is_there), for_us=for_us + MS)

    def give(self, signal: Signal) -> None:
        """Let everybody who waits for it go on."""
        waiting, signal.waiting = signal.waiting, []
        for turn in waiting:
            if not turn.is_off:
                turn.is_off = True
                self.after(0, turn.name, turn.call)

    @property
    def is_in_strand(self) -> bool:
        """Whether a strand has the turn, which may give it back; the hub may not."""
        return getcurrent() is not self._hub

    def give_turn_back(self) -> None:
        """Let others go on; returns when somebody switches back here."""
        self._hub.switch()


class Process:
    """A process of the played world: strands that live and die together, with a clock of its own."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.scheduler = scheduler
        self.name = name
        self.is_dead = False
        self._is_buried = False
        #: Crossed points until it dies by itself; None for never.
        self.points_left: int | None = None
        #: Told once, in the hub, when it has died.
        self.on_death: Callable[[], None] = lambda: None
        self._strands: list[greenlet] = []

    def spawn(self, name: str, work: Callable[[], None]) -> None:
        """Begin a strand; it ends with the process."""

        def live() -> None:
            try:
                work()
            except Died:
                if not self.is_dead:  # somebody else's death is no reason
                    raise

        strand = greenlet(live)
        self._strands.append(strand)
        self._resume_after(0, f"{self.name} {name}", strand)

    def sleep(self, delay_us: int, name: str = "sleeps") -> None:
        """Let time pass for this strand."""
        self.check()
        self._resume_after(delay_us, f"{self.name} {name}", getcurrent())
        self.scheduler.give_turn_back()
        self.check()

    def wait(self, signal: Signal, timeout_us: int, name: str = "waits") -> bool:
        """Wait for a signal; whether it came in time."""
        self.check()
        strand = getcurrent()
        came: list[bool] = []

        def go_on(*, is_come: bool) -> None:
            if not came:
                came.append(is_come)
                self._switch_to(strand)

        text = f"{self.name} {name}"
        given = Turn(text, lambda: go_on(is_come=True))
        signal.waiting.append(given)
        late = self.scheduler.after(timeout_us, f"{text} in vain", lambda: go_on(is_come=False))
        self.scheduler.give_turn_back()
        given.is_off = late.is_off = True
        self.check()
        return came[0]

    def check(self) -> None:
        """A point at which the process may die; raises `Died` when it has."""
        if self.is_dead:
            raise Died
        if self.points_left is not None:
            self.points_left -= 1
            if self.points_left <= 0:
                self.die()

    def die(self) -> NoReturn:
        """End it here and now, in a strand or in the hub."""
        self.is_dead = True
        self.scheduler.after(0, f"{self.name} is buried", self._bury)
        raise Died

    def kill(self) -> None:
        """End it at once, wherever its strands are. Only in the hub; safe to repeat."""
        self.is_dead = True
        self._bury()

    def _bury(self) -> None:
        if self._is_buried:
            return
        self._is_buried = True
        for strand in self._strands:
            if strand and not strand.dead:
                strand.parent = getcurrent()
                strand.throw(Died)
        self._strands.clear()
        self.on_death()

    def _resume_after(self, delay_us: int, name: str, strand: greenlet) -> None:
        self.scheduler.after(delay_us, name, lambda: self._switch_to(strand))

    def _switch_to(self, strand: greenlet) -> None:
        if not self.is_dead and not strand.dead:
            strand.switch()


class PlayedClock:
    """The `Clock` of one process: the world's time, and how wrong this machine is about it."""

    #: Wall clocks of the world begin here.
    FIRST_MS: Final = 1_700_000_000_000

    def __init__(self, scheduler: Scheduler, process: Process | None = None) -> None:
        self._scheduler = scheduler
        self._process = process
        #: How far the wall clock is ahead.
        self.ahead_ms = 0
        #: Parts in a million by which the steady clock is fast.
        self.drift_ppm = 0

    def now_ms(self) -> int:
        """Wall clock; see `Clock`."""
        return self.FIRST_MS + self._scheduler.now_us // MS + self.ahead_ms

    def monotonic_s(self) -> float:
        """Steady clock; see `Clock`."""
        return self._scheduler.now_us * (1_000_000 + self.drift_ppm) / 1e12

    def sleep(self, seconds: float) -> None:
        """See `Clock`."""
        if self._process is None:
            raise AssertionError("nobody sleeps in the hub")
        self._process.sleep(round(seconds * 1_000_000))
