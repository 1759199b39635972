"""Places in a subject as a command line has them: a word, a sequence, or a time."""

from __future__ import annotations

from typing import Any, Final

import click

from qmq_client.commands.times import TIME
from qmq_client.wire.errors import InvalidMessageError
from qmq_client.wire.start import parse_start


class StartParameter(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """`earliest`, `latest`, a sequence, or an ISO 8601 time; as the wire says it."""

    name = "place"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = f"sequence:{value}" if value.isascii() and value.isdecimal() else value
        try:
            return str(parse_start(text))
        except InvalidMessageError:
            pass
        try:
            return f"time:{TIME.convert(value, param, ctx)}"
        except click.BadParameter:
            self.fail(
                f"{value!r} is not a position; write earliest, latest, a sequence, "
                "or a time like 2013-01-01T09:57 or with +01:00",
                param,
                ctx,
            )


START: Final = StartParameter()
