"""Calls the application back with the outcomes of its messages: `on_sent` and `on_failed`.

Callbacks, events of the database engine and finalizers may run in the middle of a publisher's step.
Code there that waits for that publisher would wait for itself: `is_called_by` recognizes it, also
where `asyncio.to_thread` carries the call elsewhere.
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
#: The receipts of the publisher that works here.
_CALLED_BY: Final[ContextVar[object]] = ContextVar("qmq_called_by", default=None)


def is_called_by(receipts: object) -> bool:
    """Whether this code runs in a step of the publisher with these receipts."""
    return _CALLED_BY.get() is receipts


@contextmanager
def called_by(receipts: object) -> Iterator[None]:
    """What runs inside is called by the publisher with these receipts."""
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
        remedy="Return: what was sent goes out by itself. Wait in another thread.",
    )


def call_back(options: ProducerOptions, outcome: BatchOutcome) -> None:
    """Call the application back about a batch. Raises only what a callback ends the process with."""
    if options.on_sent is not None and outcome.sent:
        _call(options.on_sent, [format_message_id(message_id) for message_id in outcome.sent])
    if options.on_failed is not None:
        errors = [(row.message_id, row.error) for row in outcome.failed]
        errors += [(row.message_id, row.error) for row in outcome.parked]
        for message_id, error in errors:
            _call(options.on_failed, format_message_id(message_id), error)


def _call(callback: Callable[..., object], *given: object) -> None:
    """Call the application; what it raises is logged, and keeps nothing from anybody."""
    try:
        callback(*given)
    except Exception:  # the owner's code
        _LOG.exception("callback failed: %r", callback)
