"""Request headers: on what is sent inside, on what that causes, and nowhere else."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace

from qmq_client.consumer import consumer
from qmq_client.errors import InvalidMessageError, TooLargeError
from qmq_client.message import Message, message_to_record, record_to_message
from qmq_client.request_headers import current_request_headers, handling, request_headers
from qmq_client.wire.record import decode_record
from tests.client.consumer.kit import GROUP, SUBJECT, Bench
from tests.client.world import OUTBOX, a_world

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
OTHER_PARENT = f"00-{'1' * 32}-{'2' * 16}-00"


def headers_of(message: Message) -> dict[str, str]:
    """What the record of a message carries."""
    record = message_to_record(message, new_id=bytes(16), now_ms=0)
    return dict(record.headers)


def seen(message: Message) -> dict[str, str]:
    """What a handler sees of them."""
    record = message_to_record(message, new_id=bytes(16), now_ms=0)
    return dict(record_to_message(record).headers)


def test_headers_of_the_block_are_on_what_is_sent_inside_and_only_there() -> None:
    message = Message("s", "x", headers={"own": "1"})
    with request_headers({"tenant": "7", "Traceparent": PARENT, "tracestate": "a=b"}):
        assert seen(message) == {
            "own": "1", "tenant": "7", "traceparent": PARENT, "tracestate": "a=b",
        }  # fmt: skip
        with request_headers({"tenant": "8", "user": "ann"}):
            assert seen(message)["tenant"] == "8"
            assert seen(message)["user"] == "ann"
        assert seen(message)["tenant"] == "7"
        assert "user" not in seen(message)
    assert headers_of(message) == {"own": "1"}
    assert current_request_headers() == {}


def test_a_header_of_the_message_wins_and_a_state_belongs_to_its_trace() -> None:
    with request_headers({"tenant": "7", "traceparent": PARENT, "tracestate": "a=b"}):
        found = seen(Message("s", headers={"tenant": "9", "traceparent": OTHER_PARENT}))
    assert found == {"tenant": "9", "traceparent": OTHER_PARENT}


def test_the_headers_of_a_message_are_in_the_outbox_row(tmp_path: Path) -> None:
    with a_world(tmp_path) as world:
        with request_headers({"tenant": "7", "traceparent": PARENT}):
            world.producer.send_now(Message(SUBJECT, "a"))
        world.producer.send_now(Message(SUBJECT, "b"))
        rows = world.read(f"SELECT record FROM {OUTBOX} ORDER BY id")
        stored = [decode_record(SUBJECT, bytes(record)) for (record,) in rows]
        carried = [record_to_message(record).headers for record in stored]
        assert carried == [{"tenant": "7", "traceparent": PARENT}, {}]
        world.producer.flush()
        first, second = world.broker.messages(SUBJECT)
        assert first.headers == {"tenant": "7", "traceparent": PARENT}
        assert second.headers == {}


@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_runs_inside_the_headers_that_its_message_carries_on(
    is_async: bool,
) -> None:
    bench = Bench()
    found: list[dict[str, str]] = []

    def note() -> None:
        found.append(current_request_headers())
        bench.broker.put(Message("replies", "x"))

    @consumer(SUBJECT, group=GROUP)
    def plain(body: Any) -> None:
        note()

    @consumer(SUBJECT, group=GROUP)
    async def on_the_loop(body: Any) -> None:
        await asyncio.sleep(0)
        note()

    with request_headers({"tenant": "7", "traceparent": PARENT, "tracestate": "a=b"}):
        bench.broker.put(Message(SUBJECT, 1, headers={"own": "1"}))
    bench.broker.put(Message(SUBJECT, 2, headers={"own": "2"}))
    bench.drain(on_the_loop if is_async else plain)
    carried = {"tenant": "7", "traceparent": PARENT, "tracestate": "a=b"}
    assert found == [carried, {}]  # what was given to one message only stays with it
    first, second = bench.broker.messages("replies")
    assert (first.headers, second.headers) == (carried, {})
    assert current_request_headers() == {}


def test_a_batch_is_handled_inside_what_all_of_its_messages_carry() -> None:
    records = []
    for tenant, parent in [("7", PARENT), ("7", OTHER_PARENT)]:
        with request_headers({"tenant": tenant, "traceparent": parent, "tracestate": "a=b"}):
            records.append(headers_of(Message("s")))
    with handling(records):
        assert current_request_headers() == {"tenant": "7"}
    with handling(records[:1]):
        assert current_request_headers()["traceparent"] == PARENT


def test_another_thread_and_another_task_have_headers_of_their_own() -> None:
    found: list[dict[str, str]] = []

    async def task(tenant: str) -> None:
        with request_headers({"tenant": tenant}):
            await asyncio.sleep(0)
            found.append(current_request_headers())

    async def both() -> None:
        await asyncio.gather(task("1"), task("2"))

    with request_headers({"tenant": "0"}):
        thread = threading.Thread(target=lambda: found.append(current_request_headers()))
        thread.start()
        thread.join()
    asyncio.run(both())
    assert found == [{}, {"tenant": "1"}, {"tenant": "2"}]


@pytest.mark.parametrize(
    "parent",
    ["", "00", f"ff-{TRACE}-{'2' * 16}-00", f"00-{'0' * 32}-{'2' * 16}-00", f"00-{TRACE}-{'0' * 16}-00",
     PARENT.upper(), PARENT + "\n", PARENT + "-", f"00-{TRACE}-{'2' * 16}-00-" + "x" * 300],
    ids=["empty", "short", "version ff", "no trace", "no span", "upper", "newline", "dash", "long"],
)  # fmt: skip
def test_a_trace_that_is_not_of_its_form_is_left_out_with_its_state(parent: str) -> None:
    with request_headers({"traceparent": parent, "tracestate": "a=b", "tenant": None}):
        assert headers_of(Message("s")) == {}
    with handling([{"traceparent": parent, "tracestate": "a=b"}]):
        assert current_request_headers() == {}


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ({"no name": "x"}, InvalidMessageError),
        ({7: "x"}, InvalidMessageError),
        ({"qmq-mine": "x"}, InvalidMessageError),
        ({"number": 7}, InvalidMessageError),
        ({f"h{i}": "x" for i in range(33)}, TooLargeError),
        ({"long": "x" * 5000}, TooLargeError),
        ([("a", "b")], InvalidMessageError),
    ],
    ids=["name", "type", "reserved", "value", "many", "long", "pairs"],
)
def test_S7_headers_that_no_message_could_carry_are_refused_at_the_block(
    headers: Any, error: type[InvalidMessageError]
) -> None:
    with pytest.raises(error), request_headers(headers):
        raise AssertionError("entered")
    assert current_request_headers() == {}


def test_S7_a_reserved_header_name_is_refused_and_a_received_message_may_be_sent_on() -> None:
    with pytest.raises(InvalidMessageError, match="qmq-"):
        headers_of(Message("s", headers={"qmq-carried": "x"}))
    with request_headers({"tenant": "7"}):
        record = message_to_record(Message("s", "x"), new_id=bytes(16), now_ms=0)
    assert seen(record_to_message(record)) == {"tenant": "7"}


def test_nonsense_in_the_list_of_what_travels_on_is_passed_over() -> None:
    headers = {"qmq-carried": "a,,qmq-carried,b c,gone," + "a," * 500, "a": "1"}
    with handling([headers]):
        assert current_request_headers() == {"a": "1"}


def test_the_current_span_of_opentelemetry_is_the_trace_and_the_handlers_remote_parent() -> None:
    span = trace.SpanContext(int(TRACE, 16), 7, is_remote=False, trace_flags=trace.TraceFlags(1))
    with (
        request_headers({"traceparent": OTHER_PARENT, "tracestate": "a=b", "tenant": "7"}),
        trace.use_span(trace.NonRecordingSpan(span)),
    ):
        sent = headers_of(Message("s"))
    assert sent["traceparent"] == f"00-{TRACE}-{7:016x}-01"
    assert "tracestate" not in sent
    assert sent["tenant"] == "7"
    with handling([sent]):
        remote = trace.get_current_span().get_span_context()
        assert (f"{remote.trace_id:032x}", remote.span_id, remote.is_remote) == (TRACE, 7, True)
    assert not trace.get_current_span().get_span_context().is_valid


@pytest.mark.parametrize("carried", [[{}], [{}, {}], [{"other": "1"}]])
def test_a_handler_of_messages_that_carry_nothing_is_inside_nothing(
    carried: list[dict[str, str]],
) -> None:
    with request_headers({"tenant": "acme"}):
        with handling(carried):
            assert current_request_headers() == {}
        assert current_request_headers() == {"tenant": "acme"}
