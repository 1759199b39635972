"""Untrusted text made safe for errors, logs and terminals."""

from __future__ import annotations

from typing import Final

_SHOWN_CHARACTERS_MAX: Final = 60


def utc_text(time_s: float) -> str:
    """Seconds since 1970 UTC as ISO 8601 with milliseconds and the zone: `2026-01-02T03:04:05.678Z`.

    For log lines, so that those of machines in several zones can be sorted together.
    """
    days, ms = divmod(int(time_s * 1000), 86_400_000)
    hours, ms = divmod(ms, 3_600_000)
    minutes, ms = divmod(ms, 60_000)
    seconds, ms = divmod(ms, 1_000)
    # The Gregorian calendar counted from 1 March of the year 0, so that a leap day ends its year.
    # [Howard Hinnant, "chrono-compatible low-level date algorithms", civil_from_days]
    era, day = divmod(days + 719_468, 146_097)
    year = (day - day // 1_460 + day // 36_524 - day // 146_096) // 365
    day -= 365 * year + year // 4 - year // 100
    month = (5 * day + 2) // 153
    day -= (153 * month + 2) // 5 - 1
    month, year = (month + 2) % 12 + 1, year + 400 * era + (month >= 10)
    return f"{year:04}-{month:02}-{day:02}T{hours:02}:{minutes:02}:{seconds:02}.{ms:03}Z"


def printable(text: str) -> str:
    """The text on one line, with control characters escaped."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def shorten(value: object) -> str:
    """A printable, bounded form of any value for an error text; control characters escaped."""
    if isinstance(value, str | bytes) and len(value) > _SHOWN_CHARACTERS_MAX:
        return f"{value[:_SHOWN_CHARACTERS_MAX]!a}… ({len(value)} in all)"
    try:
        text = ascii(value)
    except Exception:  # an int of 5,000 digits, endless recursion, or an error of a __repr__
        return f"<{type(value).__name__}>"
    if len(text) <= _SHOWN_CHARACTERS_MAX:
        return text
    return f"{text[:_SHOWN_CHARACTERS_MAX]}… ({len(text)} characters)"
