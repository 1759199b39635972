"""What was tried with one message before: kept while it is not done, and with its dead letter.

Made from the actions when they are applied, so a replay gives the same. Messages that were given and
came back together share one history. It is bounded: of more than `ATTEMPTS_KEPT_MAX` attempts the
oldest are forgotten, and of all but the last only the beginning of the error is kept.
"""

from __future__ import annotations

from typing import Final

import msgspec

#: As many as a group tries by default.
ATTEMPTS_KEPT_MAX: Final = 16
#: Characters of the errors of attempts before the last one: the type and the first words.
OLD_ERROR_CHARACTERS_MAX: Final = 100

GIVEN_BACK: Final = "given back"
LEASE_ENDED: Final = "lease ended"


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    """One delivery that did not end in an ack."""

    #: Which delivery it was, from 1; again from 1 after a replay.
    attempt: int
    consumer: str
    given_at_ms: int
    ended_at_ms: int
    #: "given back", "lease ended" or "rejected".
    outcome: str
    error: str = ""


History = tuple[Attempt, ...]


def extended(history: History, attempt: Attempt) -> History:
    """The history with one attempt more."""
    kept = history[-(ATTEMPTS_KEPT_MAX - 1) :]
    if kept and len(kept[-1].error) > OLD_ERROR_CHARACTERS_MAX:
        shortened = msgspec.structs.replace(
            kept[-1], error=kept[-1].error[:OLD_ERROR_CHARACTERS_MAX]
        )
        kept = (*kept[:-1], shortened)
    return (*kept, attempt)
