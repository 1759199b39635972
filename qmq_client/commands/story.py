"""The story of one message, as steps in time: stored, given out, what came of it, where it is now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qmq_client.commands.table import table_lines, time_text

Step = Mapping[str, Any]


def story_of(found: Mapping[str, Any]) -> Iterator[Step]:
    """What happened to one message, in the order of time; what it waits for comes last.

    A step has `at_ms`, None for what has no time, `group` (empty for the message itself), `what`, and
    what else is known of it.
    """
    yield {
        "at_ms": found["stored_at_ms"],
        "group": "",
        "what": "stored",
        "message_id": found.get("message_id"),
        "subject": found["subject"],
        "sequence": found["sequence"],
    }
    steps = [step for fate in found.get("groups", ()) for step in _of_group(fate)]
    past = [step for step in steps if not step["is_now"]]
    yield from sorted(past, key=lambda step: step["at_ms"])
    yield from (step for step in steps if step["is_now"])


def _of_group(fate: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    group = fate["group"]
    for past in fate.get("history", ()):
        named = {"group": group, "attempt": past["attempt"], "consumer": past["consumer"]}
        yield {**named, "at_ms": past["given_at_ms"], "what": "given out", "is_now": False}
        ended = {"what": past["outcome"], "error": past.get("error", "")}
        yield {**named, **ended, "at_ms": past["ended_at_ms"], "is_now": False}
    known = {
        name: fate[name] for name in ("attempts", "consumer", "reason", "error") if name in fate
    }
    yield {
        "group": group,
        **known,
        "at_ms": fate.get("at_ms") or None,
        "what": fate["state"],
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
            step.get("error") or step.get("reason") or "-",
        )
        for step in steps
    ]
    return table_lines(("at", "group", "what", "attempt", "consumer", "why"), rows)
