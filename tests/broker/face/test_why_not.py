"""Why a group has not handled a message: what `qmq message show` and `trace` say of it."""

from __future__ import annotations

from typing import Any

import pytest

from qmq_client.commands.message import story_lines, story_of, what_is_missing
from qmq_client.commands.message_view import message_lines
from qmq_client.commands.table import time_text
from qmq_client.wire.requests import Tags
from tests.broker.face.asgi import Client
from tests.broker.service.rig import GROUP, SUBJECT, Rig

HOUR_MS = 3_600_000


def sent(client: Client, body: str = "wanted", **fields: Any) -> str:
    message = {"subject": SUBJECT, "body": body, **fields}
    (message_id,) = client.post("/v1/send", {"messages": [message]}).json["message_ids"]
    return str(message_id)


def told(rig: Rig, message_id: str) -> str:
    """What both commands say of the message now; each line that has to do with why."""
    client = Client(rig)
    (found,) = client.get(f"/v1/messages?id={message_id}").json["messages"]
    (place,) = client.get(f"/v1/messages/{message_id}/trace").json["places"]
    shown = [line for line in message_lines(found) if line.startswith("group ")]
    story = list(story_lines(story_of(message_id, place)))[2:]
    return "\n".join([*shown, *story, *what_is_missing(place)])


@pytest.fixture
def group(rig: Rig) -> None:
    rig.pull()


def test_a_subject_without_a_group_is_reported(rig: Rig, client: Client) -> None:
    assert told(rig, sent(client)).count("no consumer has ever pulled from it") == 2


def test_messages_before_it_and_the_last_question_are_reported(
    rig: Rig, client: Client, group: None
) -> None:
    asked_at = time_text(rig.now_ms)
    sent(client, "before")
    rig.pass_ms(HOUR_MS)
    text = told(rig, sent(client))
    why = f"messages before it come first; 1 before it; a consumer last pulled at {asked_at}"
    assert text.count(why) == 2


def test_a_group_that_nobody_has_asked_for_since_the_start_is_reported(
    rig: Rig, client: Client, group: None
) -> None:
    wanted = sent(client)
    rig.restart()
    assert told(rig, wanted).count("no consumer has pulled since the broker started") == 2


def test_a_paused_group_is_reported(rig: Rig, client: Client, group: None) -> None:
    wanted = sent(client)
    assert client.post("/v1/groups/pause", {"subject": SUBJECT, "group": GROUP}).status == 200
    assert told(rig, wanted).count("the group is paused") == 2


@pytest.mark.parametrize("is_passed", [False, True])
def test_tags_that_do_not_fit_are_reported(rig: Rig, client: Client, is_passed: bool) -> None:
    rig.pull(tags=Tags(any=("red",)))
    wanted = sent(client, tags=["green"])
    if is_passed:
        rig.pull(tags=Tags(any=("red",)))
    assert told(rig, wanted).count("its tags do not fit the group's") == 2


def test_a_group_that_starts_after_it_is_reported(rig: Rig, client: Client) -> None:
    wanted = sent(client)
    rig.pull(start="latest")
    text = told(rig, wanted)
    assert "passed (acked, or the group starts after it; `qmq message trace` shows which)" in text
    assert "never delivered: the group starts after it" in text


@pytest.mark.parametrize(
    ("delay_ms", "why"), [(60_000, "a retry, not due yet"), (9 * HOUR_MS, "a long retry")]
)
def test_a_retry_is_reported(rig: Rig, client: Client, delay_ms: int, why: str) -> None:
    wanted = sent(client)
    rig.settle(rig.pull().nack(delay_ms=delay_ms, error="ConnectionError"))
    for _ in range(3):
        rig.pass_ms(1_000)
        rig.broker.long_retries.step(rig.now_ms)
    text = told(rig, wanted)
    assert text.count(why) == 2
    assert "ConnectionError" in text


def test_an_earlier_message_of_its_key_is_reported(rig: Rig, client: Client) -> None:
    sent(client, "before", key="k")
    wanted = sent(client, key="k")
    rig.pull(ordered=True)
    assert told(rig, wanted).count("an earlier message of its key is not done") == 2


def test_of_a_message_that_was_acked_nothing_is_said(rig: Rig, client: Client) -> None:
    wanted = sent(client)
    rig.settle(rig.pull().ack())
    assert "never delivered" not in told(rig, wanted)
    assert "why=" not in told(rig, wanted)
