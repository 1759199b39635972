"""The doctor warns before a broker's bound is reached."""

from __future__ import annotations

import json

from qmq_client.doctor.broker import broker
from tests.client.transport.hostile_server import answer, hostile_server


def test_B10_the_doctor_warns_before_a_bound_is_reached() -> None:
    told = {
        "status": "serving",
        "takes_messages": True,
        "bounds": [
            {"name": "subjects", "used": 8_000, "limit": 10_000},
            {"name": "groups", "used": 7_999, "limit": 10_000},
        ],
        "tokens": [{"token": "shop", "subjects": 4_500, "groups": 1, "groups_bytes": 9}],
        "subjects_per_token": 5_000,
        "groups_per_token": 5_000,
        "groups_bytes_per_token": 100,
    }
    with hostile_server(answer(json.dumps(told).encode())) as server:
        found = [one for one in broker(server.url) if one.id == "broker.room"]
    assert [one.read.split(": ", 1)[1] for one in found] == [
        "subjects: 8000 of 10000",
        "subjects of token shop: 4500 of 5000",
    ]
    assert all("qmq subjects remove" in one.fix for one in found)
