"""What goes out over one connection, and that an answer is read as httpcore reads it, however it comes."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any

import httpcore
import httpx
import pytest

from qmq_client.transport.http import HttpTransport
from qmq_client.transport.http_connections import _HTTPCORE_ERRORS, prepare_call
from qmq_client.transport.plain_connection import PlainConnection, make_call
from qmq_client.wire.requests import SettleAnswer, SettleRequest, encode_control
from tests.client.transport.hostile_server import answer, hostile_server, raw

URL = "http://broker:9470/v1/pull"
BODY = b"0123456789"
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: x/y\r\ncontent-length: 10\r\n\r\n" + BODY


class Played:
    """A stream from which what a peer sends comes in these pieces, and then its end."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = [piece for piece in pieces if piece]
        self.sent = b""
        self.is_open = True

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.sent += buffer

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        piece = self._pieces.pop(0) if self._pieces else b""
        if len(piece) > max_bytes:
            self._pieces.insert(0, piece[max_bytes:])
        return piece[:max_bytes]

    def receive(self, count: int) -> bytes:
        return self.read(count)

    def receive_into(self, view: memoryview) -> int:
        piece = self.read(len(view))
        view[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self.is_open = False

    def get_extra_info(self, info: str) -> Any:
        return None


class PlayedStream(Played, httpcore.NetworkStream):
    """The same for httpcore."""


HOST = (b"host", b"broker")
CALL = make_call(httpcore.URL(URL), [HOST])


#: Status, headers, body and whether another request may follow; or what went wrong.
Reading = tuple[int, list[tuple[bytes, bytes]], bytes, bool] | type[Exception]


def read_here(pieces: Iterable[bytes]) -> Reading:
    connection = PlainConnection(Played(pieces))
    try:
        given = connection.exchange(CALL, b"")
        body = b"".join(given.parts)
    except Exception as error:
        return type(error)
    return given.status, given.headers, body, connection.finish()


def read_by_httpcore(pieces: Iterable[bytes]) -> Reading:
    connection = httpcore.HTTP11Connection(httpcore.URL(URL).origin, PlayedStream(pieces))
    try:
        response = connection.handle_request(httpcore.Request("POST", URL, headers=[HOST]))
        body = response.read()
        response.close()
    except Exception as error:
        return type(error)
    return response.status, list(response.headers), body, connection.is_idle()


def head(*lines: bytes, status: bytes = b"HTTP/1.1 200 OK") -> bytes:
    return b"\r\n".join((status, *lines, b"", b""))


LENGTH = b"content-length: 10"
ANSWERS = {
    "plain": PLAIN,
    "without a reason": head(LENGTH, status=b"HTTP/1.1 200 ") + BODY,
    "without a reason's space": head(LENGTH, status=b"HTTP/1.1 200") + BODY,
    "of an error": head(LENGTH, status=b"HTTP/1.1 503 Busy") + BODY,
    "of version 1.0": head(LENGTH, status=b"HTTP/1.0 200 OK") + BODY,
    "of no version": head(LENGTH, status=b"HTTP/9.9 200 OK") + BODY,
    "with a strange status": head(LENGTH, status=b"HTTP/1.1 600 Odd") + BODY,
    "empty": head(b"content-length: 0"),
    "without a length": head(b"x: y") + BODY,
    "with a length twice": head(LENGTH, LENGTH) + BODY,
    "with two lengths": head(LENGTH, b"content-length: 11") + BODY,
    "with a list of lengths": head(b"content-length: 10, 10") + BODY,
    "with a signed length": head(b"content-length: +10") + BODY,
    "with a negative length": head(b"content-length: -10") + BODY,
    "with a length in digits of another script": head("content-length: ١".encode()) + BODY,
    "with a length beyond all": head(b"content-length: " + b"9" * 400) + BODY,
    "shorter than its length": head(b"content-length: 11") + BODY,
    "longer than its length": head(b"content-length: 9") + BODY,
    "in chunks": head(b"transfer-encoding: chunked") + b"a\r\n" + BODY + b"\r\n0\r\n\r\n",
    "in chunks with a length": head(LENGTH, b"transfer-encoding: chunked") + b"0\r\n\r\n",
    "in another transfer encoding": head(LENGTH, b"transfer-encoding: gzip") + BODY,
    "the last": head(LENGTH, b"connection: close") + BODY,
    "the last, in capitals": head(LENGTH, b"Connection: Close") + BODY,
    "the last, among others": head(LENGTH, b"connection: x, close") + BODY,
    "said not to be the last": head(LENGTH, b"connection: Keep-Alive") + BODY,
    "an upgrade": head(LENGTH, b"connection: upgrade", b"upgrade: h2c") + BODY,
    "behind an early hint": head(status=b"HTTP/1.1 103 Early Hints") + PLAIN,
    "another protocol": head(LENGTH, status=b"HTTP/1.1 101 Switching Protocols") + BODY,
    "without content": head(status=b"HTTP/1.1 204 No Content"),
    "without content but a length": head(LENGTH, status=b"HTTP/1.1 204 No Content") + BODY,
    "not modified": head(LENGTH, status=b"HTTP/1.1 304 Not Modified") + BODY,
    "with names in capitals": head(b"Content-LENGTH:10") + BODY,
    "with blanks around values": head(b"content-length: \t 10 \t ", b"x:\t") + BODY,
    "with a blank before a colon": head(b"content-length : 10") + BODY,
    "with a folded line": head(b"x: y", b" z", LENGTH) + BODY,
    "with a line that is no header": head(b"nonsense", LENGTH) + BODY,
    "with an empty name": head(b": y", LENGTH) + BODY,
    "with a NUL": head(b"x: a\0b", LENGTH) + BODY,
    "with Latin-1": head(b"x: \xe9", LENGTH) + BODY,
    "with bare line feeds": b"HTTP/1.1 200 OK\ncontent-length: 10\n\n" + BODY,
    "with a bare carriage return": head(b"x: a\rb", LENGTH) + BODY,
    "cut in its head": PLAIN[:30],
    "cut behind its head": PLAIN[: -len(BODY)],
    "nothing": b"",
    "of another protocol": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "with a head of 100 KB": head(b"x: " + b"y" * 100_000, LENGTH) + BODY,
    "with a head of a megabyte": head(b"x: " + b"y" * 1_000_000, LENGTH) + BODY,
    "with a head longer than a read": head(b"x: " + b"y" * 20_000, LENGTH) + BODY,
    "long": head(b"content-length: 5000000") + b"12345" * 1_000_000,
}


@pytest.mark.parametrize("data", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_is_read_as_httpcore_reads_it(data: bytes) -> None:
    assert read_here([data]) == read_by_httpcore([data])


@pytest.mark.parametrize("data", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_that_is_damaged_is_read_as_httpcore_reads_it(data: bytes) -> None:
    source = random.Random(len(data))
    for _ in range(200):
        damaged = bytearray(data[:300])
        for _ in range(source.randrange(1, 4)):
            place = source.randrange(len(damaged) + 1)
            damaged[place : place + source.randrange(3)] = source.choice(
                (b"", b"\r\n", b"\n", b" ", b":", b"\0", b"\xff", b"0", b",", b"close", LENGTH)
            )
        pieces = [bytes(damaged)]
        assert read_here(pieces) == read_by_httpcore(pieces), pieces


@pytest.mark.parametrize("name", ["plain", "in chunks", "the last", "behind an early hint"])
def test_it_does_not_matter_in_which_pieces_an_answer_comes(name: str) -> None:
    data = ANSWERS[name]
    whole = read_here([data])
    for place in range(1, len(data)):
        assert read_here([data[:place], data[place:]]) == whole, place
    assert read_here([data[place : place + 1] for place in range(len(data))]) == whole


def test_a_body_of_a_usual_pull_is_one_part_however_it_comes() -> None:
    body = random.Random(1).randbytes(560_000)
    sent = head(b"content-length: %d" % len(body)) + body
    for step in (len(sent), 65_536, 1_000):
        pieces = [sent[first : first + step] for first in range(0, len(sent), step)]
        assert list(PlainConnection(Played(pieces)).exchange(CALL, b"").parts) == [body]


def test_a_length_that_is_only_claimed_takes_a_bounded_part_of_memory() -> None:
    connection = PlainConnection(Played([head(b"content-length: 900000000000"), b"abc"]))
    tracemalloc.start()
    try:
        with pytest.raises(httpcore.RemoteProtocolError, match="received 3 bytes"):
            list(connection.exchange(CALL, b"").parts)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
    assert not connection.finish()


class Failing(Played):
    """Fails in the middle of a body, and keeps what it was given to receive into."""

    def receive_into(self, view: memoryview) -> int:
        self.room = view
        raise TimeoutError


def test_a_body_that_does_not_come_leaves_no_view_of_its_memory() -> None:
    stream = Failing([head(LENGTH) + BODY[:3]])
    with pytest.raises(TimeoutError):
        list(PlainConnection(stream).exchange(CALL, b"").parts)
    with pytest.raises(ValueError, match="released"):
        bytes(stream.room)


def test_a_connection_whose_answer_was_not_read_to_its_end_carries_no_other_request() -> None:
    for data in (PLAIN, ANSWERS["in chunks"], ANSWERS["long"]):
        connection = PlainConnection(Played([data]))
        connection.exchange(CALL, b"")
        assert not connection.finish()


def test_a_request_that_fails_closes_its_connection() -> None:
    stream = Played([])
    with pytest.raises(httpcore.RemoteProtocolError):
        PlainConnection(stream).exchange(CALL, b"")
    assert not stream.is_open


def sent_by_httpcore(headers: Sequence[tuple[bytes, bytes]], content: bytes) -> bytes:
    stream = PlayedStream([PLAIN])
    length = (b"content-length", b"%d" % len(content))
    wanted = httpcore.Request("POST", URL, headers=[HOST, *headers, length], content=content)
    httpcore.HTTP11Connection(wanted.url.origin, stream).handle_request(wanted)
    return stream.sent


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ((b"accept", b"a/b"), (b"authorization", b"Bearer abc"), (b"x-empty", b"")),
        ((b"x-latin", b"caf\xe9"), (b"x-blanks", b"a b\tc")),
    ],
)
def test_a_request_is_written_as_httpcore_writes_it(headers: Sequence[tuple[bytes, bytes]]) -> None:
    stream = Played([PLAIN])
    PlainConnection(stream).exchange(make_call(httpcore.URL(URL), [HOST, *headers]), b"content")
    assert stream.sent.lower() == sent_by_httpcore(headers, b"content").lower()


@pytest.mark.parametrize(
    "header",
    [
        (b"x", b"a\r\nevil: 1"),
        (b"x", b"a\nevil: 1"),
        (b"x", b"a\r"),
        (b"x", b"a\0"),
        (b"x", b" a"),
        (b"x", b"a "),
        (b"x y", b"a"),
        (b"x\r\ny", b"a"),
        (b"", b"a"),
    ],
)
def test_a_header_that_would_end_its_line_is_not_sent(header: tuple[bytes, bytes]) -> None:
    with pytest.raises(httpcore.LocalProtocolError):
        make_call(httpcore.URL(URL), [HOST, header])
    with pytest.raises(httpx.LocalProtocolError):
        prepare_call(URL, [HOST, header])


def test_every_error_of_a_connection_has_its_namesake_in_httpx() -> None:
    errors = [each for each in vars(httpcore).values() if isinstance(each, type)]
    ours = [each for each in errors if issubclass(each, _HTTPCORE_ERRORS)]
    assert {httpcore.ReadTimeout, httpcore.ReadError, httpcore.RemoteProtocolError} <= set(ours)
    for each in ours:
        assert issubclass(getattr(httpx, each.__name__), httpx.TransportError)


SETTLED = encode_control(SettleAnswer(settled=1))
TYPE = b"content-type: application/vnd.qmq.frame"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(SETTLED), SETTLED)


@pytest.mark.parametrize(
    "behave",
    [answer(SETTLED, is_last=False), raw(head(TYPE, b"transfer-encoding: chunked") + CHUNKS)],
    ids=["plain", "in chunks"],
)
def test_a_connection_is_used_again_whatever_form_its_answers_have(behave: Any) -> None:
    ask = SettleRequest(subject="s", group="g", consumer="c", settlements=())
    with (
        hostile_server(behave, requests_per_connection=3) as server,
        closing(HttpTransport(server.url)) as transport,
    ):
        assert [transport.settle(ask).settled for _ in range(3)] == [1, 1, 1]
        assert server.connections == 1
