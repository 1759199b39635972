"""The cases of crash and damage that this store must survive, by number, and the tests that show it.

Collected from what went wrong in other logs and queues. Each is told in a sentence and names tests by
their functions; `test_cases.py` finds out whether there are such tests. A case that cannot happen here
says why instead. Letters: A crashes, B damage of the commit log, C derived files, D actions of
consumers, E delayed messages, F errors of the operating system, G refusals, H giving up old segments.
"""

from __future__ import annotations

from tests.crash.cases_of_files import CASES as _OF_FILES
from tests.crash.cases_of_work import CASES as _OF_WORK

CASES = _OF_FILES | _OF_WORK
