"""A peer that is broken or means harm costs one bounded call and one typed error."""

from __future__ import annotations

import gzip
import re
import tracemalloc
from contextlib import closing

import msgspec
import pytest

from qmq_client.errors import (
    BrokerAnswerError,
    BrokerBusyError,
    BrokerRefusedError,
    BrokerUnreachableError,
    NotTheBrokerError,
    TransportError,
)
from qmq_client.transport.address import BrokerAddress
from qmq_client.transport.http import HttpTransport
from qmq_client.transport.http_errors import RETRY_AFTER_S_MAX
from qmq_client.transport.json_questions import ask
from qmq_client.wire.deliveries import DeliveriesHead, DeliveryRun, build_deliveries
from qmq_client.wire.frame import FrameKind, build_frame, build_message_frame, read_header
from qmq_client.wire.limits import Limits
from qmq_client.wire.record import Record, encode_record
from qmq_client.wire.requests import (
    ErrorAnswer,
    PullRequest,
    SendAnswer,
    SettleAnswer,
    SettleRequest,
    encode_control,
    encode_json,
)
from tests.client.transport.hostile_server import (
    CHUNKED,
    DEADLINE_S,
    OK,
    Behaviour,
    HostileServer,
    answer,
    endless,
    hostile_server,
    raw,
    silent,
    trickle,
)

#: For an answer that does come, however busy the machine is.
AMPLE_S = 60.0
SMALL = Limits(record_bytes=10_000, frame_bytes=20_000)
PULL = PullRequest(subject="s", group="g", consumer="c")
SETTLE = SettleRequest(subject="s", group="g", consumer="c", settlements=())


def transport_to(server: HostileServer, within_s: float = AMPLE_S) -> closing[HttpTransport]:
    return closing(
        HttpTransport(
            server.url, limits=SMALL, connect_timeout_s=within_s, answer_timeout_s=within_s
        )
    )


def error_of(
    behave: Behaviour, *, is_pull: bool = False, within_s: float = AMPLE_S
) -> TransportError:
    with hostile_server(behave) as server, transport_to(server, within_s) as transport:
        with pytest.raises(TransportError) as caught:
            transport.pull(PULL) if is_pull else transport.settle(SETTLE)
        return caught.value


def message_frame() -> bytes:
    record = encode_record(Record(message_id=bytes(16), subject="s", body=b"abc", born_at_ms=1))
    return build_message_frame({"s": [record]})


def send_answer(frame: bytes, **changes: int) -> bytes:
    good = SendAnswer(
        frame_crc=read_header(frame).body_crc,
        count=1,
        duplicates=0,
        physical_offset=0,
        stored_at_ms=1,
        durability="durable",
    )
    return encode_control(msgspec.structs.replace(good, **changes))


HTML = "text/html"
NONSENSE = {
    "bytes that are no frame": answer(b"garbage" * 100),
    "a frame of another kind": answer(build_frame(FrameKind.SEGMENT_HEAD, b"")),
    "a frame cut short": answer(encode_control(SettleAnswer(settled=1))[:-8]),
    "a frame with a flipped bit": answer(encode_control(SettleAnswer(settled=1))[:-1] + b"\x01"),
    "another answer": answer(encode_control(ErrorAnswer(code="x", message="y"))),
    "an empty body": answer(b""),
    "a broker's own failure": answer(
        encode_json(ErrorAnswer(code="internal", message="y")),
        status="500 Internal Server Error",
        content_type="application/json",
    ),
    "an endless body": endless(CHUNKED, b"10000\r\n" + b"x" * 65_536 + b"\r\n"),
    "a body longer than it says it may be": answer(b"x" * 2_000_000),
}
NOT_THE_BROKER = {
    "an HTML page": answer(b"<html></html>", content_type=HTML),
    "no type": raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"),
    "JSON instead of a frame": answer(b"{}", content_type="application/json"),
    "no content": raw(b"HTTP/1.1 204 No Content\r\n\r\n"),
    "compressed bytes": answer(gzip.compress(b"x"), headers=("content-encoding: gzip",)),
    "an unknown coding": answer(b"x", headers=("content-encoding: rot13",)),
    "a redirect to a file": answer(
        b"", status="302 Found", headers=("location: file:///etc/passwd",)
    ),
    "a redirect to a metadata address": answer(
        b"", status="307 Temporary Redirect", headers=("location: http://169.254.169.254/",)
    ),
    "a moved page": answer(b"<html>", status="301 Moved Permanently", content_type=HTML),
    "a server error": answer(b"", status="500 Internal Server Error"),
    "a gateway's page": answer(b"<html>", status="502 Bad Gateway", content_type=HTML),
    "a gateway's JSON": answer(
        b'{"message":"no upstream"}', status="502 Bad Gateway", content_type="application/json"
    ),
    "a gateway's compressed page": answer(
        gzip.compress(b"<html>"),
        status="504 Gateway Timeout",
        content_type=HTML,
        headers=("content-encoding: gzip",),
    ),
    "a gateway's endless page": endless(
        b"HTTP/1.1 502 Bad Gateway\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n",
        b"10000\r\n" + b"x" * 65_536 + b"\r\n",
    ),
    "a 401 of something else": answer(b"<html>", status="401 Unauthorized", content_type=HTML),
    "a 403 of something else": answer(b"<html>", status="403 Forbidden", content_type=HTML),
    "a 404 of something else": answer(b"<html>", status="404 Not Found", content_type=HTML),
    "a 404 of another service": answer(
        b'{"detail":"Not Found"}', status="404 Not Found", content_type="application/json"
    ),
    "a 413 of something else": answer(b"<html>", status="413 Too Large", content_type=HTML),
    "a 4xx with broken JSON": answer(
        b'{"code":', status="422 Unprocessable", content_type="application/json"
    ),
    "another protocol": raw(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"),
    "an endless status line": endless(b"HTTP/1.1 200 ", b"O" * 65_536),
    "a 10 MB header": endless(OK + b"x-big: ", b"x" * 65_536),
    "endless headers": endless(OK, b"x-one: 1\r\n" * 1_000),
    "a chunk length that is no number": raw(CHUNKED + b"zz\r\nxx\r\n"),
    "two content lengths": raw(OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\nabc"),
}


@pytest.mark.parametrize("is_pull", [False, True], ids=["settle", "C9 pull"])
@pytest.mark.parametrize("behave", NONSENSE.values(), ids=NONSENSE)
def test_an_answer_that_makes_no_sense_is_called_that(behave: Behaviour, is_pull: bool) -> None:
    assert type(error_of(behave, is_pull=is_pull)) is BrokerAnswerError


@pytest.mark.parametrize("is_pull", [False, True], ids=["settle", "C9 pull"])
@pytest.mark.parametrize("behave", NOT_THE_BROKER.values(), ids=NOT_THE_BROKER)
def test_an_answer_of_something_else_is_an_outage_that_names_address_and_answer(
    behave: Behaviour, is_pull: bool
) -> None:
    error = error_of(behave, is_pull=is_pull)
    assert type(error) is NotTheBrokerError
    assert re.match(
        r"http://127\.0\.0\.1:\d+/v1/(pull|settle): (status \d{3}|\w+Error)", f"{error}"
    )


def test_the_server_that_answered_in_the_brokers_place_is_named() -> None:
    error = error_of(
        answer(b"<html>", status="502 Bad Gateway", content_type=HTML, headers=("server: nginx",))
    )
    assert (
        "status 502 of type 'text/html', server 'nginx', which is not an answer of a broker"
        in str(error)
    )


def test_a_busy_proxy_is_heeded_and_named() -> None:
    error = error_of(
        answer(b"<html>", status="503 Busy", content_type=HTML, headers=("retry-after: 7",))
    )
    assert isinstance(error, BrokerBusyError)
    assert error.retry_after_s == 7
    assert "status 503 of type 'text/html', which is not an answer of a broker" in str(error)


UNREACHABLE = {
    "says nothing": silent,
    "hangs up": raw(b""),
    "hangs up in the status line": raw(b"HTTP/1.1 2"),
    "hangs up in the headers": raw(OK + b"content-le"),
    "hangs up in the body": raw(OK + b"content-length: 1000\r\n\r\nabc"),
    "trickles a status line": trickle(b"HTTP/1.1 200 ", b"O"),
    "trickles a header": trickle(OK + b"x-slow: ", b"x"),
    "trickles headers": trickle(OK, b"x-one: 1\r\n"),
    "trickles a body": trickle(OK + b"content-length: 1000\r\n\r\n", b"x"),
    "trickles chunks": trickle(CHUNKED, b"1\r\nx\r\n"),
    "trickles early hints": trickle(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
}


@pytest.mark.parametrize("behave", UNREACHABLE.values(), ids=UNREACHABLE)
def test_a_peer_that_does_not_finish_its_answer_holds_a_call_to_its_deadline_only(
    behave: Behaviour,
) -> None:
    """What trickles never ends by itself: were each byte to buy another deadline, nor would the call."""
    assert type(error_of(behave, within_s=DEADLINE_S)) is BrokerUnreachableError


def test_nobody_at_the_address_is_unreachable() -> None:
    with hostile_server(silent) as server:
        url = server.url
    with (
        closing(HttpTransport(url, connect_timeout_s=DEADLINE_S)) as transport,
        pytest.raises(BrokerUnreachableError),
    ):
        transport.settle(SETTLE)


def test_a_host_name_nobody_can_look_up_is_unreachable() -> None:
    url = f"http://{'a' * 80}.invalid"
    with (
        closing(HttpTransport(url, connect_timeout_s=DEADLINE_S)) as transport,
        pytest.raises(BrokerUnreachableError),
    ):
        transport.settle(SETTLE)


def test_a_peer_that_does_not_read_holds_a_big_request_to_its_deadline_only() -> None:
    frame = build_frame(FrameKind.MESSAGES, bytes(64 * 1024 * 1024))
    with (
        hostile_server(silent, is_reading=False) as server,
        transport_to(server, DEADLINE_S) as transport,
        pytest.raises(BrokerUnreachableError),
    ):
        transport.send(frame)


def test_a_gzip_bomb_is_refused_without_being_opened() -> None:
    bomb = gzip.compress(bytes(50_000_000))
    error_of(answer(b"", status="500 Internal Server Error"))  # what the first call imports
    tracemalloc.start()
    try:
        error = error_of(answer(bomb, headers=("content-encoding: gzip",)))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert type(error) is NotTheBrokerError
    assert peak_bytes < 5_000_000


def test_a_redirect_is_not_followed() -> None:
    with hostile_server(silent) as target:
        location = f"location: {target.url}/v1/settle"
        error_of(answer(b"", status="308 Permanent Redirect", headers=(location,)))
        assert target.connections == 0


def test_a_proxy_from_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with hostile_server(silent) as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        behave = answer(encode_control(SettleAnswer(settled=0)))
        with hostile_server(behave) as server, transport_to(server) as transport:
            assert transport.settle(SETTLE).settled == 0
        assert proxy.connections == 0


def test_a_request_asks_for_plain_frames_only() -> None:
    behave = answer(encode_control(SettleAnswer(settled=0)))
    with hostile_server(behave) as server, transport_to(server) as transport:
        transport.settle(SETTLE)
        head = server.requests[0].partition(b"\r\n\r\n")[0].lower()
    assert head.startswith(b"post /v1/settle http/1.1")
    assert b"accept-encoding: identity" in head
    assert head.count(b"application/vnd.qmq.frame") == 2


def test_a_send_whose_answer_names_this_frame_is_accepted() -> None:
    frame = message_frame()
    with hostile_server(answer(send_answer(frame))) as server, transport_to(server) as transport:
        assert transport.send(frame).count == 1


@pytest.mark.parametrize("changes", [{"frame_crc": 7}, {"count": 2}, {"count": 0}])
def test_O2_an_answer_that_names_another_frame_accepts_nothing(changes: dict[str, int]) -> None:
    frame = message_frame()
    with (
        hostile_server(answer(send_answer(frame, **changes))) as server,
        transport_to(server) as transport,
        pytest.raises(BrokerAnswerError),
    ):
        transport.send(frame)


def deliveries(subject: str, count: int) -> bytes:
    record = encode_record(Record(message_id=bytes(16), subject=subject, body=b"abc", born_at_ms=1))
    head = DeliveriesHead(
        subject=subject,
        token=1,
        lease_ms=1_000,
        first_pull_sequence=0,
        runs=(DeliveryRun(first_sequence=0, count=count, attempt=1),),
    )
    return build_deliveries(head, [len(record)] * count, [record] * count)


def test_messages_that_were_asked_for_are_taken() -> None:
    with (
        hostile_server(answer(deliveries("s", 100))) as server,
        transport_to(server) as transport,
    ):
        assert len(transport.pull(PULL).messages) == 100


def test_messages_of_another_subject_are_not_taken() -> None:
    error = error_of(answer(deliveries("other", 1)), is_pull=True)
    assert type(error) is BrokerAnswerError
    assert "subject s" in str(error)


def test_more_messages_than_asked_for_are_not_taken() -> None:
    error = error_of(answer(deliveries("s", 101)), is_pull=True)
    assert type(error) is BrokerAnswerError
    assert "asked for 100 messages" in str(error)


@pytest.mark.parametrize("status", [408, 429, 503, 507])
def test_a_busy_broker_says_when_to_come_back(status: int) -> None:
    body = encode_json(ErrorAnswer(code="busy", message="too much"))
    error = error_of(
        answer(
            body,
            status=f"{status} Busy",
            content_type="application/json",
            headers=("retry-after: 7",),
        )
    )
    assert isinstance(error, BrokerBusyError)
    assert error.retry_after_s == 7


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", 1), ("soon", 1), ("-5", 1), ("nan", 1), ("1e9", RETRY_AFTER_S_MAX), ("0", 0)],
)
def test_a_senseless_retry_after_is_bounded(text: str, seconds: float) -> None:
    error = error_of(answer(b"", status="503 Busy", headers=(f"retry-after: {text}",)))
    assert isinstance(error, BrokerBusyError)
    assert error.retry_after_s == seconds


@pytest.mark.parametrize("is_json", [True, False])
def test_a_refusal_carries_what_the_broker_said(is_json: bool) -> None:
    refusal = ErrorAnswer(code="id_conflict", message="other bytes", message_id="ab" * 16)
    body = encode_json(refusal) if is_json else encode_control(refusal)
    content_type = "application/json" if is_json else "application/vnd.qmq.frame"
    error = error_of(answer(body, status="409 Conflict", content_type=content_type))
    assert isinstance(error, BrokerRefusedError)
    assert (error.status, error.answer) == (409, refusal)


@pytest.mark.parametrize("kind", ["trickles a body", "trickles chunks"])
def test_a_question_waits_for_a_body_that_trickles_to_its_deadline_only(kind: str) -> None:
    with hostile_server(UNREACHABLE[kind]) as server, pytest.raises(BrokerUnreachableError):
        ask(
            *("GET", BrokerAddress(url=server.url), "/v1/caller"),
            answer_s_max=DEADLINE_S,
            answer_bytes_max=1_000_000,
        )
