"""`ast.parse` without a disturbance that CPython 3.11 does not bear.

It counts the depth of a tree in one place for the whole process. When the garbage collector runs while a
tree is made, whatever that calls may parse too, and so may another thread that then gets its turn: pytest
for an assertion, a traceback for its carets, Hypothesis for a lambda. The first parse ends with a
`SystemError` about a «recursion depth mismatch», in a test that has no part in it.
(https://github.com/python/cpython/issues/106905; nothing happens in the releases from 3.12 on.)
"""

from __future__ import annotations

import ast
import functools
import gc
import sys
import threading
from collections.abc import Callable
from typing import Any


def parse_undisturbed() -> None:
    """Make every `ast.parse` of this process one that nothing can come between."""
    if sys.version_info < (3, 12):
        ast.parse = undisturbed(ast.parse)


def undisturbed(parse: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, one thread at a time and without the garbage collector."""
    turn = threading.RLock()

    @functools.wraps(parse)
    def parse_alone(*arguments: Any, **options: Any) -> Any:
        with turn:
            collects = gc.isenabled()
            gc.disable()
            try:
                return parse(*arguments, **options)
            finally:
                if collects:
                    gc.enable()

    return parse_alone
