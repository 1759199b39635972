"""What strangers wrote, as people are shown it: in errors, in logs and on terminals."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

_SHOWN_CHARACTERS_MAX: Final = 60


def utc_text(time_s: float) -> str:
    """Seconds since 1970 UTC as ISO 8601 with milliseconds and the zone: `2026-01-02T03:04:05.678Z`.

    For log lines: those of several machines, whatever their zones, may be sorted together.
    """
    shown = datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds")
    return shown.replace("+00:00", "Z")


def printable(text: str) -> str:
    """The text on one line, with everything escaped that a terminal could take for a command."""
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
    except Exception:  # an int of 5,000 digits, a bottomless list, whatever a __repr__ raises
        return f"<{type(value).__name__}>"
    if len(text) <= _SHOWN_CHARACTERS_MAX:
        return text
    return f"{text[:_SHOWN_CHARACTERS_MAX]}… ({len(text)} characters)"
