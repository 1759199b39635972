"""The broker's log has a line for dead letters, also for those that no consumer sees."""

from __future__ import annotations

from pathlib import Path

import httpx

from qmq_client.wire.requests import FRAME_CONTENT_TYPE
from tests.broker.service.rig import GROUP, SUBJECT, make_frame
from tests.kit.broker_process import BrokerProcess

DEADLINE_S = 60.0


def test_O7_messages_that_expire_are_reported_in_one_line(tmp_path: Path) -> None:
    with (
        BrokerProcess(tmp_path / "data") as broker,
        httpx.Client(base_url=broker.url, timeout=DEADLINE_S) as client,
    ):
        frame = make_frame([b"late", b"too"], expires_at_ms=2)
        headers = {"content-type": FRAME_CONTENT_TYPE}
        assert client.post("/v1/send", content=frame, headers=headers).is_success
        pull = {"subject": SUBJECT, "group": GROUP, "consumer": "one"}
        assert client.post("/v1/pull", json=pull).json()["messages"] == []
        line = broker.wait_for(" dead_letters ")
        assert f"subject={SUBJECT} group={GROUP} reason=expired messages=2 first_sequence=0" in line
        assert broker.stop() == 0
