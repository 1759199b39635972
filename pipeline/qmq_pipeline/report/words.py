"""Numbers and times in the page's notation."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

_DAY_S: Final = 86_400
_MINUTE_S: Final = 60
_THOUSAND: Final = 1_000
#: Digits after the point of a column, by its largest value.
_DIGITS: Final = ((1, 3), (10, 2), (100, 1))
_STEPS: Final = ((1e9, "G"), (1e6, "M"), (1e4, "k"))


def number(value: float) -> str:
    """A number that is short enough for an axis, and exact if the exact number is short."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")  # 999.7 is shown as a thousand, not in scientific notation
    for step, letter in _STEPS:
        if abs(value if letter == "k" else rounded) >= step:
            unit = _THOUSAND if letter == "k" else step
            return f"{value / unit:.3g} {letter}"
    if abs(rounded) >= _THOUSAND:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value != int(value) else f"{value:.0f}"


def cell(value: object) -> str:
    """A value in a table."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, datetime):
        return stamp(value)
    return str(value)


def column_cells(values: Sequence[object]) -> list[str]:
    """The values of one column; numbers with as many digits after the point as the largest one needs."""
    numbers = [abs(one) for one in values if isinstance(one, float)]
    if not numbers:
        return [cell(one) for one in values]
    most = max(numbers)
    digits = next((digits for bound, digits in _DIGITS if most < bound), 0)
    return [f"{one:,.{digits}f}" if isinstance(one, float) else cell(one) for one in values]


def stamp(at: datetime) -> str:
    """A time to the second, in UTC."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def time_label(at: datetime, bucket_s: int, *, is_whole: bool = False) -> str:
    """The label of a time under an axis: only the parts that distinguish neighbours."""
    at = at.astimezone(UTC)
    if is_whole:
        return at.strftime(
            "%Y-%m-%d %H:%M:%S UTC" if bucket_s < _MINUTE_S else "%Y-%m-%d %H:%M UTC"
        )
    if bucket_s < _MINUTE_S:
        return at.strftime("%H:%M:%S")
    return at.strftime("%Y-%m-%d" if bucket_s >= _DAY_S else "%m-%d %H:%M")
