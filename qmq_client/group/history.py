"""The earlier attempts of a message: kept until it is settled, and with its dead letter.

Derived from actions as they are applied, so a replay gives the same. Messages that were delivered
and returned together share one history. It is bounded: beyond `ATTEMPTS_KEPT_MAX` attempts the
oldest are forgotten, and for all but the last attempt only the beginning of the error and of its
causes is kept. If very many messages of a group fail, fewer attempts of each are kept, so that
memory and snapshots stay small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

#: As many as a group tries by default.
ATTEMPTS_KEPT_MAX: Final = 16
#: Attempts kept in one group, roughly: 200 bytes each in memory, less in a snapshot.
ATTEMPTS_PER_GROUP: Final = 100_000
#: Characters kept of the errors before the last one: types and first words.
OLD_ERROR_CHARACTERS_MAX: Final = 100

#: The text before each cause in the text of an error.
CAUSED_BY: Final = "; caused by "
#: Most parts of an error (the error and its causes) that are kept.
TEXTS_MAX: Final = 3

NACKED: Final = "nacked"
LEASE_ENDED: Final = "lease ended"


class Attempt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One delivery that did not end in an ack."""

    #: The number of the attempt, from 1; from 1 again after a replay.
    attempt: int
    consumer: str
    given_at_ms: int
    ended_at_ms: int
    #: "nacked", "lease ended" or "rejected".
    outcome: str
    error: str = ""


History = tuple[Attempt, ...]

#: Memory of one attempt without its error.
_ATTEMPT_BYTES: Final = 256


def error_bytes(error: str, history: History) -> int:
    """The memory of the errors of a message, roughly."""
    # A text takes up to four bytes a character, and so does each of its copies.
    last = error.__sizeof__() if error else 0
    return last + sum(_ATTEMPT_BYTES + one.error.__sizeof__() for one in history)


def kept_of_each(messages: int) -> int:
    """How many attempts are kept of each of `messages` messages of one group."""
    return min(ATTEMPTS_KEPT_MAX, ATTEMPTS_PER_GROUP // max(1, messages))


def extended(history: History, attempt: Attempt, kept_max: int = ATTEMPTS_KEPT_MAX) -> History:
    """The history with one more attempt: the newest ones, at most `kept_max`."""
    if history and len(history[-1].error) > OLD_ERROR_CHARACTERS_MAX:
        texts = history[-1].error.split(CAUSED_BY, TEXTS_MAX - 1)
        error = joined_texts(texts, OLD_ERROR_CHARACTERS_MAX)
        shortened = msgspec.structs.replace(history[-1], error=error)
        history = (*history[:-1], shortened)
    whole = (*history, attempt)
    return whole[max(0, len(whole) - kept_max) :]


def joined_texts(texts: Sequence[str], characters_max: int) -> str:
    """Join the texts of an error and its causes; if that is too long, each gets a share of the length.

    Requires: at most `TEXTS_MAX` texts.
    """
    whole = CAUSED_BY.join(texts)
    if len(whole) <= characters_max:
        return whole
    each_max = (characters_max - len(CAUSED_BY) * (len(texts) - 1)) // len(texts)
    return CAUSED_BY.join(text[:each_max] for text in texts)
