"""Messages that are in no subject: delayed ones that wait for their due time, or were cancelled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qmq_client.commands.broker_json import get_json
from qmq_client.commands.message_view import message_lines
from qmq_client.commands.table import time_text
from qmq_client.errors import BrokerRefusedError
from qmq_client.transport.address import BrokerAddress


def waiting_message(address: BrokerAddress, message_id: str) -> dict[str, Any] | None:
    """What the broker knows about a delayed message; None if it is not one, or may not be seen."""
    try:
        return get_json(address, f"/v1/delayed/{message_id}", {}, known=("places",))
    except BrokerRefusedError as error:
        if error.status not in (403, 404):
            raise
        return None


def waiting_lines(answer: Mapping[str, Any]) -> Iterator[str]:
    """Every time it was scheduled for, and the message itself while it waits."""
    for place in answer["places"]:
        yield f"{place['state']:<11} due {time_text(place['due_at_ms'])}"
    last = answer["places"][-1]
    if found := answer.get("message"):
        yield from message_lines({**found, "subject": last["subject"], "sequence": None})
        return
    for name in ("message_id", "subject"):
        yield f"{name:<10} {last[name]}"
    yield f"{'message':<10} not kept any more"
