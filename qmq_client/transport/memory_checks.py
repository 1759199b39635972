"""What the broker in memory refuses, as the bundled one does."""

from __future__ import annotations

from msgspec import UNSET

from qmq_client.errors import BrokerRefusedError, InvalidMessageError, InvalidNameError
from qmq_client.wire.message_id import format_message_id
from qmq_client.wire.names import check_name
from qmq_client.wire.requests import ErrorAnswer, PullRequest, SettleRequest
from qmq_client.wire.start import parse_start


def check_request(request: PullRequest | SettleRequest) -> None:
    """Refuse names and bounds that make no sense."""
    try:
        check_name(request.subject, field="subject")
        check_name(request.group, field="group")
        check_name(request.consumer, field="consumer")
    except InvalidNameError as error:
        raise refused(422, error.code, str(error)) from error
    if isinstance(request, PullRequest):
        _check_said(request)
        if not (request.max_messages and request.max_attempts and request.lease_ms):
            raise refused(422, "invalid", "max_messages, max_attempts, lease_ms: 1 or more")


def _check_said(request: PullRequest) -> None:
    try:
        parse_start(request.start)
        for tag in () if request.tags is UNSET else (*request.tags.any, *request.tags.all):
            check_name(tag, field="tags")
    except InvalidMessageError as error:
        raise refused(422, error.code, str(error)) from error


def refused(
    status: int, code: str, message: str, message_id: bytes | None = None
) -> BrokerRefusedError:
    """A refusal as the broker gives it."""
    text = "" if message_id is None else format_message_id(message_id)
    return BrokerRefusedError(status, ErrorAnswer(code=code, message=message, message_id=text))
