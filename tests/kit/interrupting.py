"""Runs something else inside a piece of work, at a chosen one of the places where Python would.

Python looks for signals, and since 3.12 for garbage, only at some of its instructions: where a function
begins, behind a call, and where a loop jumps back. A signal handler that runs there runs inside
whatever the thread is doing, with the thread's locks held, and what the handler raises is raised
there. Here these *looks* are counted, in one thread and in given files, and at one of them a test does
what it wants. A test that goes through all of them in turn depends on no luck.
"""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count
from types import CodeType, FrameType
from typing import Any, Final

#: How the names of these instructions begin.
_LOOKING: Final = ("CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")
#: In place of an offset: the function begins, and an error is on its way.
_BEGIN: Final = -1
_RAISED: Final = -2


class Interruption:
    """Work during which `act` is called once, at look number `at` from 0."""

    def __init__(self, act: Callable[[], object], *, within: Sequence[str], at: int) -> None:
        """`within`: how the paths begin of the files whose looks count."""
        self._act = act
        self._within = tuple(within)
        self._left = self.at = at
        #: Where that was, for people; empty if the work has no such look.
        self.place = ""

    def around(self, work: Callable[[], object]) -> None:
        """Do the work. Raises what it raises, and what `act` raises inside it.

        No garbage is collected meanwhile: what it ends would be interrupted in place of the work, and
        CPython to 3.12 calls a freed object where a trace ends while it makes another frame's object.
        """
        before = sys.gettrace()
        collects = gc.isenabled()
        gc.disable()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 only hears it before this
        sys.settrace(self._on_call)
        try:
            work()
        finally:
            sys.settrace(before)
            if collects:
                gc.enable()

    def _on_call(self, frame: FrameType, _: str, __: object) -> Any:
        if self.place or not frame.f_code.co_filename.startswith(self._within):
            return None
        done = _BEGIN  # where the instruction is that was executed last

        def step(frame: FrameType, kind: str, _: object) -> Any:
            nonlocal done
            if kind == "opcode":
                last, done = done, frame.f_lasti
                if _looks(frame.f_code, last, done):
                    self._look(frame)
            elif kind == "exception":
                done = _RAISED  # a call that raises does not look
            return step

        frame.f_trace = step  # Python 3.13 hears what follows only after this
        frame.f_trace_opcodes = True
        return step

    def _look(self, frame: FrameType) -> None:
        if self.place:
            return
        if self._left:
            self._left -= 1
            return
        code = frame.f_code
        self.place = f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}"
        self._act()


def at_each_look(act: Callable[[], object], *, within: Sequence[str]) -> Iterator[Interruption]:
    """One for the first look, one for the second, and so on; ends after one that found none left.

    Each is for one call of the same work.
    """
    for at in count():
        interruption = Interruption(act, within=within, at=at)
        yield interruption
        if not interruption.place:
            return


@cache
def _looks(code: CodeType, done: int, next_one: int) -> bool:
    """Whether Python looks between these two instructions.

    Left out are looks from which what is raised would go elsewhere than from the next instruction:
    `return call()` at the end of a `try` is one.
    """
    if done == _RAISED or _handler(code, done) != _handler(code, next_one):
        return False
    return done == _BEGIN or done in _looking(code)


@cache
def _looking(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions behind which Python looks."""
    found = dis.get_instructions(code)
    return frozenset(each.offset for each in found if each.opname.startswith(_LOOKING))


def _handler(code: CodeType, offset: int) -> int | None:
    """Where what is raised at this instruction goes to; None if out of the function."""
    return next((goes_to for first, end, goes_to in _handlers(code) if first <= offset < end), None)


@cache
def _handlers(code: CodeType) -> list[tuple[int, int, int]]:
    """The table that CPython's notes on exception handling describe; bytes of six bits each."""
    numbers: list[int] = []
    number = 0
    for byte in code.co_exceptiontable:
        number = number << 6 | byte & 63
        if not byte & 64:
            numbers.append(2 * number)
            number = 0
    entries = zip(*(iter(numbers),) * 4, strict=True)
    return [(first, first + length, goes_to) for first, length, goes_to, _ in entries]
