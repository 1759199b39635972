"""Questions to the broker in JSON, of commands and the doctor; messages go by the transport.

As careful as the transport: a cap on the answer, no content encoding, no proxy from the
environment, one deadline.
"""

from __future__ import annotations

from typing import Any

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
    """Status and body of the answer, whatever they are; `request` as httpx takes it.

    Raises `ConfigurationError` for a malformed address, and a `TransportError` otherwise.
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
            data = b""
            for part in response.iter_raw():
                data += part
                if len(data) > answer_bytes_max:
                    raise BrokerAnswerError(f"{url}: longer than {answer_bytes_max} bytes")
    except (httpx.UnsupportedProtocol, httpx.InvalidURL, UnicodeError) as error:
        raise ConfigurationError(
            setting="--broker", value=address.url, remedy="Use a URL like http://127.0.0.1:9470."
        ) from error
    except httpx.HTTPError as error:
        raise as_transport_error(error, url=url, certificate=address.cert_file) from error
    return response.status_code, data


def url_of(address: BrokerAddress, path: str) -> str:
    """Where a question goes, also for an error about its answer."""
    return f"{address.url.rstrip('/')}{path}"
