"""Placeholders of statements that are written as text, in the style of each driver.

Statements with many rows are text: SQLAlchemy would compile them again for each number of rows, and
pass some drivers one statement for each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, repeat
from typing import Final

import sqlalchemy as sa

from qmq_client.errors import ConfigurationError

_SAME_FOR_ALL: Final = {"qmark": "?", "format": "%s", "pyformat": "%s"}
_NUMBERED: Final = {"numeric_dollar": "$", "numeric": ":"}


def placeholders(dialect: sa.Dialect) -> Iterator[str]:
    """The placeholders of one statement for `exec_driver_sql`, the first parameter's first.

    Raises `ConfigurationError` for a style without positional parameters.
    """
    style: str = dialect.paramstyle
    if style in _SAME_FOR_ALL:
        return repeat(_SAME_FOR_ALL[style])
    if style in _NUMBERED:
        return (f"{_NUMBERED[style]}{number}" for number in count(1))
    raise ConfigurationError(
        setting="engine",
        value=f"a driver with parameters in the style {style!r}",
        remedy="Use one of the drivers that docs/databases.md lists.",
    )
