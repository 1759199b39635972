"""Subjects, groups and message ids as a command line has them: wrong ones are refused before anybody is asked."""

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
    """A text with a grammar; a wrong one is named as it was typed."""

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
#: 32 hex digits, as lower-case ones.
MESSAGE_ID: Final = _Named("message_id", _message_id)
#: The same of a message that is sent.
NEW_MESSAGE_ID: Final = _Named("message_id", _new_message_id)
