"""`qmq send SUBJECT [BODY]`: messages from a shell, straight to the broker.

No transaction and no outbox are part of it: it succeeds when the broker has stored the message, and
when the answer is lost nobody knows. `--id` makes a repeat safe.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.commands.broker_json import broker_address, broker_options, print_json
from qmq_client.commands.times import TIME
from qmq_client.errors import ConfigurationError
from qmq_client.ids import MESSAGE_IDS
from qmq_client.message import Message, message_to_record
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import FrameKind, build_message_frame
from qmq_client.wire.limits import DEFAULT_LIMITS
from qmq_client.wire.message_id import format_message_id
from qmq_client.wire.record import encode_record, is_delayed_record

#: Messages of one request; --lines sends as many requests as it takes.
_BATCH: Final = 500


@click.command()
@click.argument("subject")
@click.argument("body", required=False)
@click.option(
    "--as",
    "kind",
    type=click.Choice(["text", "json", "bytes"]),
    default="text",
    show_default=True,
    help="What the body is; json is checked.",
)
@click.option("--lines", is_flag=True, help="Each line of standard input is a message.")
@click.option("--key", help="Key of the messages.")
@click.option("--tag", "tags", multiple=True, help="A tag; may be given several times.")
@click.option(
    "--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header; the same."
)
@click.option("--id", "message_id", help="Id of the message, 32 hex digits.")
@click.option("--delay", type=float, metavar="SECONDS", help="Deliver it after so long.")
@click.option("--deliver-at", type=TIME, help="Deliver it then; ISO 8601, UTC without a zone.")
@click.option("--ttl", type=float, metavar="SECONDS", help="Of no use after so long.")
@broker_options
def send(
    *,
    subject: str,
    body: str | None,
    kind: str,
    lines: bool,
    broker: str | None,
    config_file: Path | None,
    as_json: bool,
    **parts: Any,
) -> None:
    """Send BODY, or standard input where there is none, and print the id of each message.

    Without a transaction: for tests and repairs. Exit code 0 says that the broker has it durably.
    """
    if lines and (body is not None or parts["message_id"] is not None):
        raise ConfigurationError(
            setting="--lines", value="with a body or --id", remedy="Give it alone."
        )
    address = broker_address(broker, config_file)
    headers = dict(_header(text) for text in parts["headers"])
    if body is None:
        _tell_who_types()
    texts = _lines() if lines else iter([_whole() if body is None else body.encode()])
    transport = HttpTransport(address)
    try:
        for batch in _batches(texts):
            messages = [
                Message(
                    subject,
                    _body(text, kind),
                    key=parts["key"],
                    tags=parts["tags"],
                    headers=headers,
                    message_id=parts["message_id"],
                    delay=parts["delay"],
                    deliver_at=_moment(parts["deliver_at"]),
                    ttl=parts["ttl"],
                )
                for text in batch
            ]
            _send(transport, subject, messages, as_json)
    finally:
        transport.close()


def _send(transport: HttpTransport, subject: str, messages: list[Message], as_json: bool) -> None:
    now_ms = SYSTEM_CLOCK.now_ms()
    records = [
        message_to_record(message, new_id=MESSAGE_IDS.next_id(), now_ms=now_ms)
        for message in messages
    ]
    encoded = [encode_record(record, DEFAULT_LIMITS) for record in records]
    kind = FrameKind.DELAYED if is_delayed_record(encoded[0]) else FrameKind.MESSAGES
    answer = transport.send(build_message_frame({subject: encoded}, kind=kind))
    ids = [format_message_id(record.message_id) for record in records]
    if as_json:
        print_json({**msgspec.to_builtins(answer), "message_ids": ids})
        return
    for text in ids:
        click.echo(text)


def _body(text: bytes, kind: str) -> Any:
    if kind == "bytes":
        return text
    if kind == "text":
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise ConfigurationError(
                setting="body", value="is not UTF-8", remedy="Give --as bytes."
            ) from error
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigurationError(
            setting="body", value=f"is not JSON ({error})", remedy="Mend it, or give --as text."
        ) from error


def _moment(time_ms: int | None) -> datetime | None:
    return None if time_ms is None else datetime.fromtimestamp(time_ms / 1000, UTC)


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationError(setting="--header", value=text, remedy="Give NAME=VALUE.")
    return name, value


def _tell_who_types() -> None:
    """A terminal gives no sign by itself that something is waited for."""
    if sys.stdin.isatty():
        click.echo("reading standard input; Ctrl-D ends it", err=True)


def _whole() -> bytes:
    return sys.stdin.buffer.read(DEFAULT_LIMITS.record_bytes + 1)


def _lines() -> Iterator[bytes]:
    for line in sys.stdin.buffer:
        if text := line.rstrip(b"\r\n"):
            yield text


def _batches(texts: Iterator[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size_bytes = 0
    for text in texts:
        if batch and (len(batch) == _BATCH or size_bytes + len(text) > 1024 * 1024):
            yield batch
            batch, size_bytes = [], 0
        batch.append(text)
        size_bytes += len(text)
    if batch:
        yield batch
