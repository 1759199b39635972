"""What is asked of delayed messages, as it goes over the wire."""

from __future__ import annotations

from qmq_client.wire.delayed import CancelRequest
from qmq_client.wire.requests import encode_json


def test_a_request_says_no_more_than_it_must_for_brokers_that_know_less() -> None:
    assert encode_json(CancelRequest(message_ids=("a",))) == b'{"message_ids":["a"]}'
    told = encode_json(CancelRequest(message_ids=("a",), subject="s", withdrawn=True))
    assert told == b'{"message_ids":["a"],"subject":"s","withdrawn":true}'
