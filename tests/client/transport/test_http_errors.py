"""The map from httpx's errors to ours is complete, and settings are checked at construction."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import create_engine

from qmq_client import Consumers, Producer, consumer, create_tables, pull
from qmq_client.errors import (
    BrokerUnreachableError,
    ConfigurationError,
    NotTheBrokerError,
    TransportError,
)
from qmq_client.transport.http import HttpTransport
from qmq_client.transport.http_errors import as_transport_error

REQUEST = httpx.Request("POST", "http://broker/v1/send")

#: Each error of httpx, with what it means here. A new one in a later httpx fails the test below.
MEANING: dict[str, type[TransportError]] = {
    "CloseError": BrokerUnreachableError,
    "ConnectError": BrokerUnreachableError,
    "ConnectTimeout": BrokerUnreachableError,
    "CookieConflict": BrokerUnreachableError,
    "DecodingError": NotTheBrokerError,
    "HTTPError": BrokerUnreachableError,
    "HTTPStatusError": NotTheBrokerError,
    "InvalidURL": BrokerUnreachableError,
    "LocalProtocolError": BrokerUnreachableError,
    "NetworkError": BrokerUnreachableError,
    "PoolTimeout": BrokerUnreachableError,
    "ProtocolError": BrokerUnreachableError,
    "ProxyError": BrokerUnreachableError,
    "ReadError": BrokerUnreachableError,
    "ReadTimeout": BrokerUnreachableError,
    "RemoteProtocolError": NotTheBrokerError,
    "RequestError": BrokerUnreachableError,
    "RequestNotRead": BrokerUnreachableError,
    "ResponseNotRead": BrokerUnreachableError,
    "StreamClosed": BrokerUnreachableError,
    "StreamConsumed": BrokerUnreachableError,
    "StreamError": BrokerUnreachableError,
    "TimeoutException": BrokerUnreachableError,
    "TooManyRedirects": NotTheBrokerError,
    "TransportError": BrokerUnreachableError,
    "UnsupportedProtocol": BrokerUnreachableError,
    "WriteError": BrokerUnreachableError,
    "WriteTimeout": BrokerUnreachableError,
}


def httpx_errors() -> dict[str, type[Exception]]:
    return {
        name: value
        for name, value in vars(httpx).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }


def made(kind: type[Exception]) -> Exception:
    if kind is httpx.HTTPStatusError:
        return httpx.HTTPStatusError("x", request=REQUEST, response=httpx.Response(500))
    parameters = inspect.signature(kind).parameters
    needed = [one for one in parameters.values() if one.default is one.empty]
    return kind(*(["x"] if any(one.name == "message" for one in needed) else []))


def test_every_error_of_httpx_has_a_meaning() -> None:
    assert set(httpx_errors()) == set(MEANING)


@pytest.mark.parametrize("name", MEANING)
def test_an_error_of_httpx_becomes_what_it_means(name: str) -> None:
    error = as_transport_error(made(httpx_errors()[name]), url="http://broker")
    assert type(error) is MEANING[name]
    assert "http://broker" in str(error)


@pytest.mark.parametrize("name", MEANING)
def test_every_error_of_httpx_is_caught_where_it_can_arise(name: str) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise made(httpx_errors()[name])

    caught = (httpx.HTTPError, httpx.InvalidURL, RuntimeError, OSError, UnicodeError)
    if name == "CookieConflict":  # only for cookies that a caller looks up; we look up none
        return
    with pytest.raises(caught), httpx.Client(transport=httpx.MockTransport(fail)) as client:
        client.post("http://broker")


def test_a_protocol_error_of_a_peer_that_hung_up_is_a_lost_connection() -> None:
    error = as_transport_error(
        httpx.RemoteProtocolError("x"), url="http://broker", was_closed_by_peer=True
    )
    assert type(error) is BrokerUnreachableError


@pytest.mark.parametrize(
    "url",
    [
        "",
        "broker:9470",
        "ftp://broker",
        "http://",
        "http://broker:0",
        "http://broker:99999",
        "http://broker:abc",
        "http://[::1",
        "http://broker/?a=b",
        "http://broker/#x",
        "http://user:secret@broker",
        "http://bro\x00ker",
        " http://broker",
        "http://broker ",
        "http://bro ker",
        "http://broker/q mq",
        "http://" + "ä" * 70 + ".example",
    ],
)
def test_an_address_that_cannot_work_is_refused_and_no_password_is_shown(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        HttpTransport(url)
    assert caught.value.setting == "broker_url"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_timeout_that_cannot_work_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigurationError):
        HttpTransport(answer_timeout_s=seconds)
    with pytest.raises(ConfigurationError):
        HttpTransport(connect_timeout_s=seconds)


def test_a_producer_that_is_refused_for_its_broker_leaves_no_connection(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    engine = create_engine(f"sqlite:///{path}")
    create_tables(engine)
    engine.dispose()
    given: Any = 9470
    with pytest.raises(ConfigurationError) as refused:  # the error holds the frames of the refusal
        Producer(engine, given)
    opened = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    # With the whole path: other tests have files of this name, some of them open until collected.
    assert [found for found in opened if str(found).startswith(str(path))] == [], refused


@pytest.mark.parametrize("given", [None, 9470, b"http://127.0.0.1:9470"])
def test_what_is_no_broker_is_refused_where_it_is_given(given: Any, tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    create_tables(engine)
    told = r"broker: .*\. Give a URL like http://127\.0\.0\.1:9470, or a BrokerAddress\."
    with pytest.raises(ConfigurationError, match=told):
        Producer(engine, given)
    with pytest.raises(ConfigurationError, match=told):
        Consumers([consumer("order", group="audit")(lambda message: None)], given)
    with pytest.raises(ConfigurationError, match=told), pull(given, subject="order", group="a"):
        raise AssertionError("nothing can be pulled")
    engine.dispose()
