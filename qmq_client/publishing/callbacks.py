"""Calls the application's callbacks `on_sent` and `on_failed` with the outcomes of its messages.

Callbacks, events of the database engine and finalizers may run in the middle of a publisher's step.
Code there that waits for that publisher would wait for itself: `is_called_by` recognizes it, also
in another thread of `asyncio.to_thread`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from qmq_client.errors import ConfigurationError
from qmq_client.options import ProducerOptions
from qmq_client.outbox.row import BatchOutcome
from qmq_client.wire.message_id import format_message_id

_LOG: Final = logging.getLogger("qmq.publisher")
#: The receipts of the publisher that runs this code.
_CALLED_BY: Final[ContextVar[object]] = ContextVar("qmq_called_by", default=None)


def is_called_by(receipts: object) -> bool:
    """Whether this code runs in a step of the publisher with these receipts."""
    return _CALLED_BY.get() is receipts


@contextmanager
def called_by(receipts: object) -> Iterator[None]:
    """Mark the code inside the block as called by the publisher with these receipts."""
    before = _CALLED_BY.set(receipts)
    try:
        yield
    finally:
        _CALLED_BY.reset(before)


def waits_for_itself(call: str) -> ConfigurationError:
    """The error for such a call while the same producer's publisher works."""
    return ConfigurationError(
        setting=call,
        value="called by the publisher, as in on_sent or on_failed of the same producer, so it would "
        "wait for itself",
        remedy="Return: the messages are sent without waiting. Wait in another thread.",
    )


def call_back(options: ProducerOptions, outcome: BatchOutcome) -> None:
    """Call the application back about a batch. Raises only exits, such as `SystemExit`."""
    if options.on_sent is not None and outcome.sent:
        _call(options.on_sent, [format_message_id(message_id) for message_id in outcome.sent])
    if options.on_failed is not None:
        errors = [(row.message_id, row.error) for row in outcome.failed]
        errors += [(row.message_id, row.error) for row in outcome.parked]
        for message_id, error in errors:
            _call(options.on_failed, format_message_id(message_id), error)


def _call(callback: Callable[..., object], *given: object) -> None:
    """Call the application; its exceptions are logged and have no other effect."""
    try:
        callback(*given)
    except Exception:  # the application's code
        _LOG.exception("callback failed: %r", callback)
