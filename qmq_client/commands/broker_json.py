"""Asking the broker for JSON: what commands for people need, beside the transport for messages.

As careful as the transport: a cap on the answer, no content encoding, no proxy from the environment,
one deadline. A refusal, trouble with the connection and an answer that makes no sense are the errors
of the transport, so that exit codes are the same everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from qmq_client.errors import (
    BrokerAnswerError,
    BrokerBusyError,
    BrokerRefusedError,
    ConfigurationError,
    ProtocolError,
)
from qmq_client.wire.names import shorten
from qmq_client.wire.requests import ErrorAnswer, decode_json

#: A search over hundreds of megabytes takes seconds.
ANSWER_TIMEOUT_S: Final = 60.0
#: The broker gives 8 MiB of messages at most; in JSON some of it is longer.
ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
_BUSY: Final = frozenset({429, 503})


def get_json(
    broker_url: str, path: str, question: Mapping[str, str], *, known: Collection[str]
) -> dict[str, Any]:
    """The answer to a GET, an object that has at least the `known` fields.

    Raises `ConfigurationError` for an address that is none, else a `TransportError`.
    """
    import httpx  # late: `qmq --help` lists commands without it

    from qmq_client.transport.http import as_transport_error

    url = f"{broker_url.rstrip('/')}{path}"
    try:
        with (
            httpx.Client(timeout=ANSWER_TIMEOUT_S, trust_env=False) as client,
            client.stream(
                "GET", url, params=dict(question), headers={"accept-encoding": "identity"}
            ) as response,
        ):
            data = b""
            for part in response.iter_raw():
                data += part
                if len(data) > ANSWER_BYTES_MAX:
                    raise BrokerAnswerError(f"{url}: longer than {ANSWER_BYTES_MAX} bytes")
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise ConfigurationError(
            setting="--broker", value=broker_url, remedy="Give one like http://127.0.0.1:9470."
        ) from error
    except httpx.HTTPError as error:
        raise as_transport_error(error, url=url) from error
    if response.status_code != 200:
        raise _refusal(url, response.status_code, data)
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or not set(known) <= answer.keys():
        raise BrokerAnswerError(f"{url}: the answer is no broker's")
    return answer


def _refusal(url: str, status: int, data: bytes) -> Exception:
    try:
        answer = decode_json(data, ErrorAnswer)
    except ProtocolError:
        return BrokerAnswerError(f"{url}: status {status}, and an answer that is no broker's")
    if status in _BUSY:
        return BrokerBusyError(f"{status}: {shorten(answer.message)}", retry_after_s=1.0)
    return BrokerRefusedError(status, answer)
