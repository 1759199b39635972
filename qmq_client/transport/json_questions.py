"""HTTP requests with JSON answers, for commands and the doctor; messages are sent by the transport.

Like the transport, it bounds the length of an answer and uses neither content encodings nor proxies of the environment.
"""

from __future__ import annotations

from typing import Any

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.errors import BrokerAnswerError, ConfigurationError
from qmq_client.transport.address import BrokerAddress
from qmq_client.transport.http_errors import as_transport_error


def ask(
    method: str,
    address: BrokerAddress,
    path: str,
    *,
    answer_s_max: float,
    answer_bytes_max: int,
    **request: Any,
) -> tuple[int, bytes]:
    """Send a request; returns status and body of the answer, also of a refusal. `request` has
    further arguments of httpx.

    `answer_s_max` bounds the connect, each write, each read of the head, and the whole body. Raises
    `ConfigurationError` for a malformed address, otherwise a `TransportError`.
    """
    import httpx  # late: `qmq --help` lists commands without it

    url = url_of(address, path)
    headers = {"accept-encoding": "identity", **address.headers()}
    try:
        with (
            httpx.Client(
                timeout=answer_s_max, trust_env=False, verify=address.ssl_context()
            ) as client,
            client.stream(method, url, headers=headers, **request) as response,
        ):
            data, end_s = b"", SYSTEM_CLOCK.monotonic_s() + answer_s_max
            for part in response.iter_raw():
                data += part
                if SYSTEM_CLOCK.monotonic_s() > end_s:
                    raise httpx.ReadTimeout(f"no complete answer within {answer_s_max:g} s")
                if len(data) > answer_bytes_max:
                    raise BrokerAnswerError(
                        f"{url}: the answer is longer than {answer_bytes_max} bytes"
                    )
    except (httpx.UnsupportedProtocol, httpx.InvalidURL, UnicodeError) as error:
        raise ConfigurationError(
            setting="--broker", value=address.url, remedy="Use a URL like http://127.0.0.1:9470."
        ) from error
    except httpx.HTTPError as error:
        raise as_transport_error(error, url=url, certificate=address.cert_file) from error
    return response.status_code, data


def url_of(address: BrokerAddress, path: str) -> str:
    """The URL of a request; error texts about its answer name it too."""
    return f"{address.url.rstrip('/')}{path}"
