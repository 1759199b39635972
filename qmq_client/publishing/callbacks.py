"""Calls the application back about what became of its messages: `on_sent` and `on_failed`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from qmq_client.options import ProducerOptions
from qmq_client.outbox.row import BatchOutcome
from qmq_client.wire.message_id import format_message_id

_LOG: Final = logging.getLogger("qmq.publisher")


def call_back(options: ProducerOptions, outcome: BatchOutcome) -> None:
    """Tell the application of a batch. Raises only what a callback ends the process with."""
    if options.on_sent is not None and outcome.sent:
        _tell(options.on_sent, [format_message_id(message_id) for message_id in outcome.sent])
    if options.on_failed is not None:
        errors = [(row.message_id, row.error) for row in outcome.failed]
        errors += [(row.message_id, row.error) for row in outcome.parked]
        for message_id, error in errors:
            _tell(options.on_failed, format_message_id(message_id), error)


def _tell(callback: Callable[..., object], *given: object) -> None:
    """Call the application; what it raises is logged, and keeps nothing from anybody."""
    try:
        callback(*given)
    except Exception:  # the owner's code
        _LOG.exception("callback failed: %r", callback)
