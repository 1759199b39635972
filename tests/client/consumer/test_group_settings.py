"""Settings that the broker keeps: how they are checked here, and what is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

import pytest
from msgspec import UNSET
from sqlalchemy import create_engine

from qmq_client.consumer import Consumers, HandlerCall, consumer, pull
from qmq_client.consumer.options import BACKOFF_MS_MAX
from qmq_client.errors import ConfigurationError, InvalidNameError
from qmq_client.message import Message
from qmq_client.retry import Backoff
from qmq_client.testing import MemoryTransport, RecordingProducer, drain
from qmq_client.wire.deliveries import Deliveries
from qmq_client.wire.requests import (
    PullRequest,
    SettleAnswer,
    SettleRequest,
    Tags,
    decode_json,
    encode_json,
)
from tests.client.consumer.kit import GROUP, SUBJECT, Bench

NEW = ("tags", "ordered", "at_most_once", "broadcast", "backoff")


class Listening(MemoryTransport):
    """Remembers what is asked, and asks the broker for no more than it can do."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.broker)
        self.pulls: list[PullRequest] = []
        self.settles: list[SettleRequest] = []

    def pull(self, request: PullRequest) -> Deliveries:
        self.pulls.append(request)
        plain = dict.fromkeys(NEW, UNSET) | {"start": "earliest"}
        fields = {name: getattr(request, name) for name in request.__struct_fields__}
        return super().pull(PullRequest(**(fields | plain)))

    def settle(self, request: SettleRequest) -> SettleAnswer:
        self.settles.append(request)
        fields = {name: getattr(request, name) for name in request.__struct_fields__}
        return super().settle(SettleRequest(**(fields | {"broadcast": UNSET})))


def asked(bench: Bench, **settings: Any) -> PullRequest:
    transport = Listening(bench)
    handler = consumer(SUBJECT, group=GROUP, **settings)(lambda body: None)
    drain(Consumers(handler, transport, clock=bench.clock, consumer_id="one"))
    return transport.pulls[0]


def test_what_is_not_set_stands_in_no_bytes_of_the_request(bench: Bench) -> None:
    said = decode_json(encode_json(asked(bench)), dict[str, Any])
    assert not said.keys() & set(NEW)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"tags": "paid"}, {"tags": Tags(any=("paid",))}),
        ({"tags": ["paid", "packed"]}, {"tags": Tags(any=("paid", "packed"))}),
        ({"all_tags": ("eu", "b2b")}, {"tags": Tags(all=("eu", "b2b"))}),
        ({"ordered": True}, {"ordered": True}),
        ({"at_most_once": True}, {"at_most_once": True}),
        ({"broadcast": True}, {"broadcast.kind": "ephemeral"}),
        ({"broadcast": "named"}, {"broadcast.kind": "named"}),
        ({"start": 42}, {"start": "sequence:42"}),
        ({"start": "sequence:42"}, {"start": "sequence:42"}),
        ({"start": datetime(2013, 1, 1, 9, 57, tzinfo=UTC)}, {"start": "time:1357034220000"}),
    ],
    ids=str,
)
def test_each_setting_is_asked_for_in_the_words_of_the_wire(
    bench: Bench, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    request = asked(bench, **settings)
    assert {name: attrgetter(name)(request) for name in expected} == expected


def test_waits_of_the_group_are_asked_for_as_they_are(bench: Bench) -> None:
    backoff = asked(bench, backoff=Backoff(first_ms=50, factor=3, max_ms=900)).backoff
    assert backoff is not UNSET
    assert (backoff.first_ms, backoff.factor, backoff.max_ms) == (50, 3, 900)


def test_pull_asks_for_the_same_and_refuses_what_it_has_not(bench: Bench) -> None:
    transport = Listening(bench)
    settings: Any = {"start": 7, "tags": "paid", "ordered": True}
    with pull(transport, subject=SUBJECT, group=GROUP, **settings):
        pass
    (request,) = transport.pulls
    assert (request.start, request.ordered) == ("sequence:7", True)
    assert request.tags == Tags(any=("paid",))
    wrong: Any = {"at_most_once": True}
    with pytest.raises(ConfigurationError, match="at_most_once"):  # noqa: SIM117
        with pull(transport, subject=SUBJECT, group=GROUP, **wrong):
            pass


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"start": "yesterday"}, "start"),
        ({"start": datetime(2013, 1, 1)}, "start"),  # without a zone on purpose
        ({"start": -1}, "start"),
        ({"start": True}, "start"),
        ({"tags": 7}, "tags"),
        ({"all_tags": tuple("abcdefghijklmnopq")}, "all_tags: 17 tags"),
        ({"max_wait_ms": 15_001}, "max_wait_ms.*15000"),
        ({"broadcast": "loud"}, "broadcast"),
        ({"timeout_ms": 600_001}, "timeout_ms: 600001, with a lease of up to 600000"),
        ({"broadcast": []}, "broadcast"),
        ({"broadcast": 1}, "broadcast"),
        ({"ordered": "no"}, "ordered"),
        ({"at_most_once": 0}, "at_most_once"),
        ({"auto_ack": None}, "auto_ack"),
        ({"on_stale": 7}, "on_stale"),
        ({"backoff": 7}, "backoff"),
        ({"backoff": Backoff(max_ms=BACKOFF_MS_MAX + 1)}, "backoff: max_ms"),
        ({"backoff": Backoff(jitter=0.0)}, "backoff: jitter"),
        ({"at_most_once": True, "ordered": True}, "ordered"),
        ({"at_most_once": True, "auto_ack": False}, "auto_ack"),
        ({"at_most_once": True, "backoff": Backoff()}, "backoff"),
        ({"inbox": create_engine("sqlite://"), "at_most_once": True}, "at_most_once"),
        ({"inbox": create_engine("sqlite://"), "broadcast": True}, "broadcast"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_cannot_work_is_refused_at_the_decoration(settings: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        consumer(SUBJECT, group=GROUP, **settings)(lambda body: None)


def test_a_tag_that_is_no_name_is_refused() -> None:
    with pytest.raises(InvalidNameError, match="tags"):
        consumer(SUBJECT, group=GROUP, tags="not a name")(lambda body: None)


def test_a_subject_of_the_brokers_own_is_refused_at_the_decoration_and_at_the_send() -> None:
    with pytest.raises(InvalidNameError, match="the broker's own"):
        consumer("_qmq.copies", group=GROUP)(lambda body: None)
    with RecordingProducer() as producer, pytest.raises(InvalidNameError, match="broker's own"):
        producer.send_now(Message("_qmq.copies", "one"))


def test_C10_a_named_broadcast_needs_a_name_that_is_the_same_the_next_time(bench: Bench) -> None:
    handler = consumer(SUBJECT, group=GROUP, broadcast="named")(lambda body: None)
    with pytest.raises(ConfigurationError, match="consumer_id"):
        bench.consumers(handler)
    with pytest.raises(InvalidNameError, match="consumer_id"):
        Consumers(handler, bench.transport, consumer_id="not a name")
    assert Consumers(handler, bench.transport, consumer_id="shop-1").consumer_id == "shop-1"


def test_C10_outcomes_name_the_broadcast_as_the_pull_did(bench: Bench) -> None:
    transport = Listening(bench)
    bench.put(1)
    handler = consumer(SUBJECT, group=GROUP, broadcast=True)(lambda body: None)
    drain(Consumers(handler, transport, clock=bench.clock))
    (settled,) = transport.settles
    assert settled.broadcast == "ephemeral"


@pytest.mark.parametrize("error", [None, ValueError("no")], ids=["returns", "raises"])
def test_at_most_once_tells_the_broker_nothing_and_counts_what_was_dropped(
    bench: Bench, error: Exception | None
) -> None:
    transport = Listening(bench)
    around: list[str] = []

    @contextmanager
    def look(call: HandlerCall) -> Iterator[None]:
        around.append(call.subject)
        yield

    @consumer(SUBJECT, group=GROUP, at_most_once=True, lease_ms=100, middleware=look)
    def handler(body: int) -> None:
        bench.clock.advance(3_600_000)  # no lease ends it
        if error is not None:
            raise error

    bench.put(1)
    consumers = Consumers(handler, transport, clock=bench.clock)
    member = consumers.members[0]
    member.pull_once(is_blocking=False)
    bench.clock.advance(3_600_000)
    member.settle_once()
    member.work_once(is_blocking=False)
    assert member.settle_once().count == 0
    assert transport.settles == []
    assert around == [SUBJECT]
    counted = bench.counters(consumers)
    assert counted == {"pulled": 1, "acked" if error is None else "dropped": 1}


def test_what_a_stop_drops_of_what_comes_at_most_once_is_reported(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    handler = consumer(SUBJECT, group=GROUP, at_most_once=True, concurrency=3)(lambda body: None)
    bench.put(1, 2, 3)
    consumers = Consumers(handler, Listening(bench), clock=bench.clock)
    consumers.members[0].pull_once(is_blocking=False)
    assert consumers.members[0].stop() == 3
    assert "messages_dropped consumer=orders/audit messages=3" in caplog.text
    assert bench.counters(consumers) == {"pulled": 3, "dropped": 3}


def test_at_most_once_pulls_no_more_than_can_be_begun(bench: Bench) -> None:
    @consumer(SUBJECT, group=GROUP, at_most_once=True, batch_size=4)
    def handler(bodies: list[int]) -> None: ...

    bench.put(*range(100))
    transport = Listening(bench)
    drain(Consumers(handler, transport, clock=bench.clock))
    assert {request.max_messages for request in transport.pulls} == {4}


def test_at_most_once_pulls_ahead_where_that_is_asked_for(bench: Bench) -> None:
    @consumer(SUBJECT, group=GROUP, at_most_once=True, prefetch_max=50)
    def handler(body: int) -> None: ...

    bench.put(*range(100))
    transport = Listening(bench)
    drain(Consumers(handler, transport, clock=bench.clock))
    asked = [request.max_messages for request in transport.pulls]
    assert (asked[0], max(asked)) == (1, 50), "as soon as the handler was seen to be fast"
