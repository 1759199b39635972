"""Numbers and times in the page's notation."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

_DAY_S: Final = 86_400
_THOUSAND: Final = 1_000
_STEPS: Final = ((1e9, "G"), (1e6, "M"), (1e4, "k"))


def number(value: float) -> str:
    """Short enough for an axis, and exact where the exact number is short."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")  # 999.7 is shown as a thousand, and not by a power of ten
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


def stamp(at: datetime) -> str:
    """A time to the second, in UTC."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def time_label(at: datetime, bucket_s: int, *, is_whole: bool = False) -> str:
    """A time under an axis: as much of it as is needed to tell two neighbours apart."""
    at = at.astimezone(UTC)
    if is_whole:
        return at.strftime("%Y-%m-%d %H:%M UTC")
    return at.strftime("%Y-%m-%d" if bucket_s >= _DAY_S else "%m-%d %H:%M")
