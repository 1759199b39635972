"""What tests of the routes about delayed messages ask and look up."""

from __future__ import annotations

from typing import Any

from tests.broker.delay.delay_rig import DelayRig
from tests.broker.face.asgi import Client


def ids_of(rig: DelayRig) -> list[str]:
    """Of what waits, in the order of due times."""
    return [one.message_id for one in rig.broker.delayed.query.listed(None, 0, 2**63, 10)]


def cancel(client: Client, *message_ids: str, **more: Any) -> Any:
    """The outcome of each."""
    body = {"message_ids": list(message_ids), **more}
    return client.post("/v1/delayed/cancel", body).json["outcomes"]
