"""HTTP requests of commands to a broker, with JSON answers.

Refusals, connection failures and malformed answers raise the transport's errors, so exit codes are
the same everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from qmq_client.commands.settings import config_option, json_option, loaded
from qmq_client.errors import BrokerOlderError, NotTheBrokerError, ProtocolError
from qmq_client.transport.address import BrokerAddress
from qmq_client.transport.http_errors import refusal
from qmq_client.transport.json_questions import ask, url_of
from qmq_client.wire.requests import UNKNOWN_ROUTES, ErrorAnswer, decode_json

#: A search over hundreds of megabytes takes seconds.
ANSWER_TIMEOUT_S: Final = 60.0
#: The broker returns at most 8 MiB of messages, which are longer in JSON.
ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
_Function = TypeVar("_Function", bound=Callable[..., Any])

broker_option: Final = click.option(
    "--broker", metavar="URL", help="Broker; by default QMQ_BROKER_URL, then the configuration."
)


def broker_options(function: _Function) -> _Function:
    """Add `--broker`, `--config` and `--json`, for a command that sends requests to a broker."""
    return broker_option(config_option(json_option(function)))


def broker_address(broker: str | None, config_file: Path | None) -> BrokerAddress:
    """The broker's address, with this caller's credentials."""
    flags = {} if broker is None else {"broker.url": broker}
    return BrokerAddress.of_section(loaded(config_file, flags=flags).config.broker)


def print_json(value: object) -> None:
    """Print an answer as JSON for programs."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def get_json(
    address: BrokerAddress,
    path: str,
    question: Mapping[str, object],
    *,
    known: Collection[str],
    statuses: Collection[int] = (200,),
) -> dict[str, Any]:
    """The answer to a GET: an object with at least the `known` fields. Parameters of None are not sent.

    Answers with a status not in `statuses` are refusals. Raises `ConfigurationError` for a
    malformed address, and a `TransportError` otherwise.
    """
    given = {name: str(value) for name, value in question.items() if value is not None}
    return _ask("GET", address, path, known, statuses, params=given)


def post_json(
    address: BrokerAddress, path: str, body: Mapping[str, object], *, known: Collection[str]
) -> dict[str, Any]:
    """The answer to a POST that changes something; like `get_json`."""
    said = {name: value for name, value in body.items() if value is not None}
    return _ask("POST", address, path, known, (200,), json=said)


def _ask(
    method: str,
    address: BrokerAddress,
    path: str,
    known: Collection[str],
    statuses: Collection[int],
    **request: Any,
) -> dict[str, Any]:
    status, data = ask(
        method,
        address,
        path,
        answer_s_max=ANSWER_TIMEOUT_S,
        answer_bytes_max=ANSWER_BYTES_MAX,
        **request,
    )
    url = url_of(address, path)
    if status not in statuses:
        raise _refusal(f"{method} {url}", status, data)
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or not set(known) <= answer.keys():
        raise NotTheBrokerError(
            url=url, answer="an answer without the expected fields", status=status
        )
    return answer


def _refusal(asked: str, status: int, data: bytes) -> Exception:
    try:
        answer = decode_json(data, ErrorAnswer)
    except ProtocolError:
        return NotTheBrokerError(url=asked, answer=f"status {status}", status=status)
    if answer.code == UNKNOWN_ROUTES.get(status):
        return BrokerOlderError(
            f"{asked}: this broker does not know this request: it is older than this command. Update the broker, or "
            "use the commands of its version."
        )
    return refusal(status, answer)
