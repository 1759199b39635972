"""The story of one message as steps in time: stored, delivered, settled, and where it is now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qmq_client.commands.message_view import NO_GROUP, why_text
from qmq_client.commands.table import table_lines, time_text

Step = Mapping[str, Any]


def story_of(message_id: str, place: Mapping[str, Any]) -> list[Step]:
    """What happened to a message at one place, in order of time; its present place comes last.

    A step has `at_ms` (None without a time), `group` (empty for the message itself), `what`, and
    any further facts.
    """
    stored = {
        "at_ms": place["stored_at_ms"],
        "group": "",
        "what": "stored",
        "message_id": message_id,
        "subject": place["subject"],
        "sequence": place["sequence"],
    }
    past = [step for told in place["groups"] for step in _past(told, place)]
    now = [_now(told, place) for told in place["groups"] if told.get("now")]
    return [stored, *sorted(past, key=lambda step: step["at_ms"]), *now]


def what_is_missing(place: Mapping[str, Any]) -> Iterator[str]:
    """What this story cannot tell, as sentences."""
    if (first_ms := place.get("told_from_ms")) is not None:
        yield (
            f"events before {time_text(first_ms)} are no longer kept, except failed attempts of a "
            "message that is not acked"
        )
    if (next_ms := place.get("told_until_ms")) is not None:
        yield f"events after {time_text(next_ms)} were too many to read"
    if not place["groups"]:
        yield f"consumer groups: {NO_GROUP}"


def _past(told: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of one group, and attempts that only its state remembers."""
    group, first_ms = told["group"], place.get("told_from_ms")
    events = [{**event, "group": group, "what": event["event"]} for event in told["events"]]
    history = (told.get("now") or {}).get("history", ())
    known = {(event["what"], event.get("attempt"), event["at_ms"]) for event in events}
    for past in history if first_ms is not None else ():
        named = {"group": group, "attempt": past["attempt"], "consumer": past["consumer"]}
        given = {**named, "at_ms": past["given_at_ms"], "what": "given"}
        ended = {**named, "at_ms": past["ended_at_ms"], "what": past["outcome"]}
        if error := past.get("error"):
            ended["error"] = error
        for step in (given, ended):
            if (step["what"], step["attempt"], step["at_ms"]) not in known:
                yield step
    for event in events:
        del event["event"]
        yield event


def _now(told: Mapping[str, Any], place: Mapping[str, Any]) -> dict[str, Any]:
    now = told["now"]
    known = {name: now[name] for name in ("attempts", "consumer", "reason", "error") if name in now}
    why = why_text(now)
    if now["state"] == "passed" and not why and not told["events"] and "told_from_ms" not in place:
        why = "never delivered: the group starts after it, or was moved past it"
    if why:
        known["why"] = why
    return {
        "group": told["group"],
        **known,
        "at_ms": now.get("at_ms") or None,
        "what": now["state"],
        "is_now": True,
    }


def story_lines(steps: Sequence[Step]) -> Iterator[str]:
    """The steps as a table; the last of each group says where the message is now."""
    rows = [
        (
            time_text(step["at_ms"]) if step.get("at_ms") else "-",
            step["group"] or "-",
            f"now {step['what']}" if step.get("is_now") else step["what"],
            step.get("attempt") or step.get("attempts") or "-",
            step.get("consumer") or "-",
            "; ".join(filter(None, map(step.get, ("error", "reason", "why")))) or "-",
        )
        for step in steps
    ]
    return table_lines(("at", "group", "what", "attempt", "consumer", "why"), rows)
