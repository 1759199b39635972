"""The parameter type for times on the command line."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Time(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """An ISO 8601 time, UTC unless it names a zone, as milliseconds since 1970."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            self.fail(
                f"{value!r} is not a time; write 2013-01-01T09:57 (UTC) or 2013-01-01T09:57+01:00",
                param,
                ctx,
            )
        if time.tzinfo is None:
            time = time.replace(tzinfo=UTC)
        if time < _EPOCH:
            self.fail(f"{value!r} is before 1970", param, ctx)
        return (time - _EPOCH) // timedelta(milliseconds=1)


TIME: Final = Time()
