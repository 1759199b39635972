"""The JSON on the page about requests is what the broker reads and writes."""

from __future__ import annotations

import itertools
import json

import pytest

from qmq_broker.face.limits import FaceLimits
from qmq_broker.face.routes.json_messages import JsonSend, deliveries_to_json, json_to_frame
from qmq_broker.face.strict_json import JSON_DEPTH_MAX
from qmq_broker.service.delivery.delivery import HandOut
from qmq_client.wire.deliveries import Records
from qmq_client.wire.limits import DEFAULT_LIMITS
from qmq_client.wire.requests import (
    CONTROL_BYTES_MAX,
    FRAME_CONTENT_TYPE,
    JSON_CONTENT_TYPE,
    decode_json,
    encode_json,
)
from tests.format.pages import marks, read_page
from tests.golden.version_1 import CONTROLS, DELIVERIES_HEAD, FRAME_RUNS, RECORDS, golden


def json_of(name: str) -> bytes:
    return "\n".join(marks("requests.md", "json")[name]).encode()


def test_every_json_of_the_page_is_compared() -> None:
    assert set(marks("requests.md", "json")) == {"send", "deliveries", *CONTROLS}


@pytest.mark.parametrize("name", CONTROLS)
def test_the_json_of_a_request_or_answer_is_the_golden_value(name: str) -> None:
    value = CONTROLS[name]
    assert decode_json(json_of(name), type(value)) == value
    assert json.loads(json_of(name)) == json.loads(encode_json(value))


def never() -> bytes:
    raise AssertionError("every message of the example brings its id")


def test_the_json_of_a_send_makes_the_golden_message_frame() -> None:
    born_at_ms = RECORDS["record_plain"].born_at_ms
    request = decode_json(json_of("send"), JsonSend)
    data, ids = json_to_frame(
        request, new_id=never, now_ms=born_at_ms, latest_ms=born_at_ms, limits=DEFAULT_LIMITS
    )
    assert data == golden("frame_messages")
    names = itertools.chain.from_iterable(FRAME_RUNS.values())
    assert list(ids) == [RECORDS[name].message_id.hex() for name in names]


def test_the_json_of_a_pulls_answer_says_what_the_golden_deliveries_say() -> None:
    encoded = [golden(name) for name in FRAME_RUNS["flight.departed"]]
    given = HandOut(head=DELIVERIES_HEAD, records=Records.of(encoded))
    assert json.loads(deliveries_to_json(given)) == json.loads(json_of("deliveries"))


def test_the_bounds_of_requests_on_the_page_are_those_of_the_code() -> None:
    page = " ".join(read_page("requests.md").split())
    assert f"nested at most {JSON_DEPTH_MAX} deep" in page
    frame_mib, control_mib = DEFAULT_LIMITS.frame_bytes // 2**20, CONTROL_BYTES_MAX // 2**20
    json_mib = FaceLimits().json_bytes // 2**20
    assert (
        f"({frame_mib} MiB) in a send of frames, {json_mib} MiB in one of JSON, and {control_mib} MiB "
        "in a pull or settle"
    ) in page
    for content_type in (FRAME_CONTENT_TYPE, JSON_CONTENT_TYPE):
        assert f"| `{content_type}` |" in page
