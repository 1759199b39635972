"""Receipts: the outcome of one message, for callers that wait for it.

A receipt is requested before the commit and gets one `SendOutcome`; messages without a receipt cost nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator, Iterable
from enum import StrEnum
from typing import Any, Final
from weakref import WeakValueDictionary

from qmq_client.deadline import checked_deadline_s
from qmq_client.errors import OutboxError
from qmq_client.publishing.callbacks import is_called_by, waits_for_itself
from qmq_client.wire.message_id import format_message_id

#: Open receipts of one producer: far more than a process can wait for.
RECEIPTS_MAX: Final = 100_000
#: The only key of a receipt's answers: `setdefault` is atomic, so the first answer counts.
_FIRST: Final = "first"


class SendOutcome(StrEnum):
    """The outcome of a message, as known to the process that sent it."""

    #: The broker has accepted it.
    ACCEPTED = "accepted"
    #: No committed row was found after the transaction's end: it, or a savepoint in it, was rolled back, or
    #: the message was cancelled. A row that is committed later, as in two phases, is sent by the watchdog.
    ROLLED_BACK = "rolled back"
    #: The broker refused it, or its attempts are used up; it waits for a person.
    PARKED = "parked"
    #: Not accepted by this process. If the transaction committed, the row is in the outbox and the
    #: watchdog sends it.
    LEFT = "left to the watchdog"


class Receipt:
    """The outcome of one message. Any thread or task may ask, any number of times.

    `await receipt` gives the outcome without blocking the event loop. Limit the wait with
    `asyncio.timeout`, as for any wait for another system.
    """

    __slots__ = ("__weakref__", "_answers", "_opened_by", "_waiting", "message_id")

    def __init__(self, message_id: str, opened_by: Receipts) -> None:
        self._opened_by = opened_by
        #: 32 hex digits.
        self.message_id = message_id
        # Both are changed in atomic steps, so no lock is needed.
        self._answers: dict[str, tuple[SendOutcome, str]] = {}
        #: Functions to call once there is an answer.
        self._waiting: dict[Callable[[], object], None] = {}

    @property
    def outcome(self) -> SendOutcome | None:
        """The outcome; None while it is not known."""
        answer = self._answers.get(_FIRST)
        return None if answer is None else answer[0]

    @property
    def error(self) -> str:
        """Why the message was not accepted; empty if no reason is known."""
        answer = self._answers.get(_FIRST)
        return "" if answer is None else answer[1]

    def wait(self, deadline_s: float = 10.0) -> SendOutcome | None:
        """Block until the outcome is known; None if the deadline comes first.

        Raises `ConfigurationError` in a callback of the same producer, unless the outcome is known.
        """
        self._check_wait()
        deadline_s = checked_deadline_s("deadline_s of receipt.wait", deadline_s)
        ended = threading.Event()
        self._waiting[ended.set] = None
        try:
            if (
                self.outcome is None
            ):  # read after registering: an outcome is either seen or wakes the wait
                ended.wait(deadline_s)
        finally:
            self._waiting.pop(ended.set, None)
        return self.outcome

    def __await__(self) -> Generator[Any, None, SendOutcome]:
        return self._arrival().__await__()

    async def _arrival(self) -> SendOutcome:
        self._check_wait()
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed, which ended the wait
                loop.call_soon_threadsafe(ended.set)

        self._waiting[wake] = None
        try:
            while (outcome := self.outcome) is None:
                await ended.wait()
        finally:
            self._waiting.pop(wake, None)
        return outcome

    def _check_wait(self) -> None:
        if self.outcome is None and is_called_by(self._opened_by):
            raise waits_for_itself("receipt")

    def __repr__(self) -> str:
        return f"<Receipt {self.message_id}: {self.outcome or 'open'}>"

    def _resolve(self, outcome: SendOutcome, error: str = "") -> None:
        """Set the answer; only the first answer counts."""
        self._answers.setdefault(_FIRST, (outcome, error))
        for wake in self._waiting.copy():
            wake()


class Receipts:
    """The open receipts of one publisher. May be called from any thread.

    A receipt without references is forgotten.
    """

    def __init__(self) -> None:
        #: Reentrant: the garbage collector may close a producer in the middle of `open`.
        self._lock = threading.RLock()
        self._open: WeakValueDictionary[bytes, Receipt] = WeakValueDictionary()

    def open(self, message_id: bytes) -> Receipt:
        """The receipt for a message that is not enqueued yet; one for each message."""
        with self._lock:
            receipt = self._open.get(message_id)
            if receipt is None or receipt.outcome is not None:
                if len(self._open) >= RECEIPTS_MAX:
                    raise OutboxError(
                        f"{RECEIPTS_MAX} receipts are open already. Drop those that no code waits "
                        "for, or use `ProducerOptions.on_sent`, which has no limit"
                    )
                receipt = Receipt(format_message_id(message_id), self)
                self._open[message_id] = receipt
        return receipt

    def resolve(self, message_ids: Iterable[bytes], outcome: SendOutcome, error: str = "") -> None:
        """Answer the receipts of these messages."""
        if not self._open:
            return
        for message_id in message_ids:
            receipt = self._open.pop(message_id, None)
            if receipt is not None:
                receipt._resolve(outcome, error)
