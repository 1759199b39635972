"""Formats messages from the broker's JSON as lines for people.

Control characters in a message cannot move the terminal's cursor.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from qmq_client.commands.table import table_lines, time_text
from qmq_client.wire.shown import printable

#: The text for a subject without a consumer group.
NO_GROUP: Final = (
    "none on this subject: no consumer has ever pulled from it, or the group was removed"
)
_COLUMNS: Final = ("stored_at", "message_id", "subject", "sequence", "key", "tags", "body")
#: The state of the group does not distinguish the two; its history does.
_PASSED: Final = "acked, or the group starts after it; `qmq message trace` shows which"
_STILL_TO_COME: Final = ("not yet", "waiting", "held")
_BODY_SHOWN_CHARACTERS: Final = 60
_HEX_SHOWN_BYTES: Final = 64


def message_table(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each message."""
    rows = [
        (
            time_text(found["stored_at_ms"]),
            found["message_id"] or "?",
            found["subject"],
            found["sequence"],
            found.get("key") or "-",
            ",".join(found.get("tags", ())) or "-",
            shortened(body_text(found)),
        )
        for found in messages
    ]
    return table_lines(_COLUMNS, rows)


def by_subject(
    answer: Mapping[str, Any],
) -> Iterator[tuple[list[dict[str, Any]], Mapping[str, Any]]]:
    """Places and message of each subject that has a delayed message with this id.

    As in a search, the subject of the newest one is first; its places are in order of time.
    """
    waiting = {one["subject"]: one for one in answer["messages"]}
    for subject in dict.fromkeys(place["subject"] for place in reversed(answer["places"])):
        places = [place for place in answer["places"] if place["subject"] == subject]
        yield places, waiting.get(subject, {})


def message_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """All known facts about one message."""
    lines: list[tuple[str, str]] = [
        ("message_id", found.get("message_id") or "?"),
        ("subject", found["subject"]),
    ]
    if found["sequence"] is not None:
        lines.append(("sequence", str(found["sequence"])))
    if "offset" in found:
        lines.append(("offset", str(found["offset"])))
    if "stored_at_ms" in found:
        lines.append(("stored_at", time_text(found["stored_at_ms"])))
    lines += [
        ("born_at", time_text(found["born_at_ms"]) if "born_at_ms" in found else "?"),
        ("key", found.get("key") or "-"),
        ("tags", ", ".join(found.get("tags", ())) or "-"),
    ]
    if found.get("expires_at_ms") is not None:
        lines.append(("expires_at", time_text(found["expires_at_ms"])))
    lines += [("header", f"{name}: {value}") for name, value in found.get("headers", {}).items()]
    if found.get("error"):
        lines.append(("error", found["error"]))
    lines.append(("body", body_text(found)))
    if "groups" in found:
        lines += [("group", _group(each)) for each in found["groups"]]
        if not found["groups"]:
            lines.append(("group", NO_GROUP))
    for name, text in lines:
        yield f"{name:<10} {printable(text)}"


def body_text(found: Mapping[str, Any]) -> str:
    """A text unchanged, JSON as JSON, bytes as their number and the first of them."""
    encoded = found.get("body_base64") or found.get("record_base64")
    if encoded is None and "body_base64" not in found:
        body = found.get("body")
        return body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
    data = base64.b64decode(encoded or "")
    more = " …" if len(data) > _HEX_SHOWN_BYTES else ""
    return f"{len(data)} bytes {data[:_HEX_SHOWN_BYTES].hex()}{more}".rstrip()


def _group(found: Mapping[str, Any]) -> str:
    said = {
        "attempts": found.get("attempts"),
        "consumer": found.get("consumer"),
        "at": time_text(found["at_ms"]) if "at_ms" in found else None,
        "reason": found.get("reason"),
        "error": found.get("error"),
        "why": why_text(found),
    }
    parts = [f"{name}={value}" for name, value in said.items() if value]
    if found["state"] == "passed" and not parts:
        parts = [_PASSED]
    return f"{found['group']}: {found['state']}" + (f" ({', '.join(parts)})" if parts else "")


def why_text(found: Mapping[str, Any]) -> str:
    """The known reason why a group has not handled a message; empty if it has."""
    parts = [found["why"]] if found.get("why") else []
    if count := found.get("before"):
        parts.append(f"{count} before it")
    if asked_at_ms := found.get("asked_at_ms"):
        parts.append(f"a consumer last pulled at {time_text(asked_at_ms)}")
    elif found["state"] in _STILL_TO_COME:
        parts.append("no consumer has pulled since the broker started")
    return "; ".join(parts)


def shortened(text: str) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    if len(line) <= _BODY_SHOWN_CHARACTERS:
        return line
    return line[: _BODY_SHOWN_CHARACTERS - 1] + "…"
