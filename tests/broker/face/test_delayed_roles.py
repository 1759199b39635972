"""Delayed messages are named by their ids: whose they are is asked where the message is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.wire.frame import FrameKind, build_message_frame
from qmq_client.wire.record import Record, encode_record
from qmq_client.wire.requests import FRAME_CONTENT_TYPE
from tests.broker.face.guard import add_token
from tests.kit.broker_process import BrokerProcess

MINE, OTHERS = "orders.eu", "bills"
DAY_MS = 86_400_000
IDS = {MINE: bytes([1]) * 16, OTHERS: bytes([2]) * 16}
ROLES = {
    "producer": "producer:orders.*",
    "consumer": "consumer:orders.*",
    "admin": "admin:orders.*",
    "operator": "admin",
}


def frame(due_at_ms: int) -> bytes:
    """Both messages, due then."""
    records = {
        subject: [
            encode_record(
                Record(
                    message_id=message_id,
                    subject=subject,
                    body=b"x",
                    born_at_ms=1,
                    due_at_ms=due_at_ms,
                )
            )
        ]
        for subject, message_id in IDS.items()
    }
    return build_message_frame(records, kind=FrameKind.DELAYED)


class Caller:
    def __init__(self, client: httpx.Client, token: str) -> None:
        self._client = client
        self._headers = {"authorization": f"Bearer {token}"}

    def get(self, path: str) -> int:
        return self._client.get(path, headers=self._headers).status_code

    def post(self, path: str, body: Any) -> Any:
        return self._client.post(path, json=body, headers=self._headers)

    def send(self, data: bytes) -> int:
        headers = {**self._headers, "content-type": FRAME_CONTENT_TYPE}
        return self._client.post("/v1/send", content=data, headers=headers).status_code


def test_only_those_with_a_role_on_its_subject_see_move_or_cancel_a_delayed_message(
    tmp_path: Path,
) -> None:
    tokens = tmp_path / "tokens.json"
    texts = {name: add_token(tokens, role, name=name)[1] for name, role in ROLES.items()}
    due_at_ms = SYSTEM_CLOCK.now_ms() + DAY_MS
    with (
        BrokerProcess(tmp_path / "data", "--reserve-bytes", "0", "--tokens", str(tokens)) as broker,
        httpx.Client(base_url=broker.url, timeout=30) as client,
    ):
        callers = {name: Caller(client, text) for name, text in texts.items()}
        data = frame(due_at_ms)
        assert [one.send(data) for one in callers.values()] == [403, 403, 403, 200]
        seen = {
            name: [one.get(f"/v1/delayed/{message_id.hex()}") for message_id in IDS.values()]
            for name, one in callers.items()
        }
        assert seen == {
            "producer": [404, 404],
            "consumer": [200, 404],
            "admin": [200, 404],
            "operator": [200, 200],
        }
        later = {"deliver_at_ms": due_at_ms + DAY_MS}
        for name, one in callers.items():
            for subject, message_id in IDS.items():
                body = {"message_id": message_id.hex(), **later}
                may = name == "operator" or (subject == MINE and name != "consumer")
                reply = one.post("/v1/delayed/reschedule", body)
                refused = 403 if name == "consumer" else 404
                assert reply.status_code == (200 if may else refused), (name, subject)
        ids = [message_id.hex() for message_id in IDS.values()]
        cancel = {"message_ids": ids}
        assert callers["consumer"].post("/v1/delayed/cancel", cancel).status_code == 403
        outcomes = {
            name: callers[name].post("/v1/delayed/cancel", cancel).json()["outcomes"]
            for name in ("producer", "operator")
        }
        assert outcomes["producer"] == ["cancelled", "unknown"]
        assert outcomes["operator"][1] == "cancelled"
        assert broker.stop() == 0
