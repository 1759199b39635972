"""Parameter types for subjects, groups and message ids; invalid ones are refused before any request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from qmq_client.wire.errors import InvalidMessageError
from qmq_client.wire.groups import check_group
from qmq_client.wire.message_id import LEAVE_OUT, format_message_id, parse_message_id
from qmq_client.wire.names import check_name
from qmq_client.wire.shown import shorten


class _Named(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """A text with a grammar; the error shows an invalid one as it was typed."""

    def __init__(self, name: str, checked: Callable[[str], str]) -> None:
        self.name = name
        self._checked = checked

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return self._checked(value)
        except InvalidMessageError as error:
            self.fail(f"{shorten(value)}; allowed: {error.limit}. {error.remedy}", param, ctx)


def _message_id(text: str) -> str:
    return format_message_id(parse_message_id(text.lower()))


def _new_message_id(text: str) -> str:
    return format_message_id(parse_message_id(text.lower(), remedy=LEAVE_OUT))


SUBJECT: Final = _Named("subject", lambda text: check_name(text, field="subject"))
#: `group`, or `group@consumer` for one consumer of a broadcast.
GROUP: Final = _Named("group", check_group)
#: 32 hex digits, converted to lower case.
MESSAGE_ID: Final = _Named("message_id", _message_id)
#: The same for a message to be sent.
NEW_MESSAGE_ID: Final = _Named("message_id", _new_message_id)
