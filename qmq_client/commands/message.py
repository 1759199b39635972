"""`qmq message find | show`: messages as the broker has them, by id, or by key and time.

Changes nothing. When the broker's key index lags, or a bound was reached, the answer says so on
standard error: what is not listed may then be there nevertheless.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import click

from qmq_client.commands.broker_json import get_json
from qmq_client.commands.exit_codes import ATTENTION
from qmq_client.commands.settings import config_option, json_option, loaded
from qmq_client.errors import ConfigurationError, InvalidMessageError
from qmq_client.wire.message_id import parse_message_id

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_COLUMNS: Final = ("stored_at", "message_id", "subject", "sequence", "key", "tags", "body")
_BODY_SHOWN_CHARACTERS: Final = 60
_HEX_SHOWN_BYTES: Final = 64
#: As many as the broker gives at once.
_FOUND_MAX: Final = 1_000

_broker_option = click.option(
    "--broker", metavar="URL", help="Broker; QMQ_BROKER_URL or the configuration else."
)


class _Time(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """An ISO 8601 time, UTC where it names no zone; as milliseconds since 1970."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is no time; write 2013-01-01T09:57 or with +01:00", param, ctx)
        if time.tzinfo is None:
            time = time.replace(tzinfo=UTC)
        if time < _EPOCH:
            self.fail(f"{value!r} is before 1970", param, ctx)
        return (time - _EPOCH) // timedelta(milliseconds=1)


@click.group()
def message() -> None:
    """Find messages at the broker."""


@message.command()
@click.option("--id", "message_id", metavar="ID", help="The message with this id.")
@click.option("--key", help="Messages with this key; needs --subject.")
@click.option("--subject", help="Subject of the messages with that key.")
@click.option("--from", "first_ms", type=_Time(), help="Stored at this time or later.")
@click.option("--to", "next_ms", type=_Time(), help="Stored before this time.")
@click.option("--limit", type=click.IntRange(1, _FOUND_MAX), default=100, show_default=True)
@_broker_option
@config_option
@json_option
def find(
    *,
    message_id: str | None,
    key: str | None,
    subject: str | None,
    limit: int,
    broker: str | None,
    config_file: Path | None,
    as_json: bool,
    **times: int | None,
) -> None:
    """List messages by id, or by subject, key and time; newest first.

    Times are ISO 8601, UTC where no zone is given. Exit code 1 when nothing was found.
    """
    if (message_id is None) == (key is None) or (key is not None and subject is None):
        raise ConfigurationError(
            setting="--id, --key",
            value="which messages are meant is not clear",
            remedy="Give --id, or --subject and --key.",
        )
    if message_id is not None and (subject, *times.values()) != (None, None, None):
        raise ConfigurationError(
            setting="--id",
            value="with --subject, --from or --to",
            remedy="Give --id alone: an id names one message.",
        )
    question = {
        "id": _checked(message_id),
        "subject": subject,
        "key": key,
        "from": times["first_ms"],
        "to": times["next_ms"],
        "count": limit,
    }
    answer = _ask(broker, config_file, question)
    if as_json:
        click.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        _list(answer)
    _warn(answer)
    if not answer["messages"]:
        raise SystemExit(ATTENTION)


@message.command()
@click.argument("message_id")
@_broker_option
@config_option
@json_option
def show(message_id: str, broker: str | None, config_file: Path | None, as_json: bool) -> None:
    """Show all that is known of one message, and what became of it in each group.

    A message that was sent again after the dedupe window is shown once for each place. Exit code 1
    when it is not there.
    """
    answer = _ask(broker, config_file, {"id": _checked(message_id), "count": _FOUND_MAX})
    if as_json:
        click.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        for number, found in enumerate(answer["messages"]):
            if number:
                click.echo()
            _show(found)
    _warn(answer)
    if not answer["messages"]:
        if not as_json:
            click.echo(f"{message_id} is not at this broker", err=True)
        raise SystemExit(ATTENTION)


def _ask(
    broker: str | None, config_file: Path | None, question: Mapping[str, object]
) -> dict[str, Any]:
    flags = {} if broker is None else {"broker.url": broker}
    url = loaded(config_file, flags=flags).config.broker.url
    given = {name: str(value) for name, value in question.items() if value is not None}
    return get_json(url, "/v1/messages", given, known=("messages", "is_complete"))


def _checked(message_id: str | None) -> str | None:
    """The id, if it can be one: a slip is told here, without asking anybody."""
    if message_id is None:
        return None
    text = message_id.lower()
    try:
        parse_message_id(text)
    except InvalidMessageError as error:
        raise InvalidMessageError(
            field="message id",
            limit=error.limit,
            value=error.value,
            remedy="Copy it from a receipt, a log line or `qmq outbox list`.",
        ) from error
    return text


def _list(answer: Mapping[str, Any]) -> None:
    rows = [
        (
            _time(found["stored_at_ms"]),
            found["message_id"] or "?",
            found["subject"],
            str(found["sequence"]),
            found.get("key") or "-",
            ",".join(found.get("tags", ())) or "-",
            _shortened(_body(found)),
        )
        for found in answer["messages"]
    ]
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    for row in (_COLUMNS, *rows):
        cells = zip(row, widths, strict=True)
        click.echo("  ".join(f"{cell:<{width}}" for cell, width in cells).rstrip())


def _show(found: Mapping[str, Any]) -> None:
    lines: list[tuple[str, str]] = [
        ("message_id", found.get("message_id") or "?"),
        ("subject", found["subject"]),
        ("sequence", str(found["sequence"])),
        ("offset", str(found["offset"])),
        ("stored_at", _time(found["stored_at_ms"])),
        ("born_at", _time(found["born_at_ms"]) if "born_at_ms" in found else "?"),
        ("key", found.get("key") or "-"),
        ("tags", ", ".join(found.get("tags", ())) or "-"),
    ]
    lines += [("header", f"{name}: {value}") for name, value in found.get("headers", {}).items()]
    if found.get("error"):
        lines.append(("error", found["error"]))
    lines.append(("body", _body(found)))
    lines += [("group", _group(fate)) for fate in found.get("groups") or ()]
    for name, text in lines:
        click.echo(f"{name:<10} {text}")
    if not found.get("groups"):
        click.echo(f"{'group':<10} none on this subject")


def _body(found: Mapping[str, Any]) -> str:
    """A text as it is, JSON as JSON, bytes as their number and the first of them."""
    encoded = found.get("body_base64") or found.get("record_base64")
    if encoded is None and "body_base64" not in found:
        body = found.get("body")
        return body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
    data = base64.b64decode(encoded or "")
    more = " …" if len(data) > _HEX_SHOWN_BYTES else ""
    return f"{len(data)} bytes {data[:_HEX_SHOWN_BYTES].hex()}{more}".rstrip()


def _group(fate: Mapping[str, Any]) -> str:
    said = {
        "attempts": fate.get("attempts"),
        "consumer": fate.get("consumer"),
        "at": _time(fate["at_ms"]) if "at_ms" in fate else None,
        "reason": fate.get("reason"),
        "error": fate.get("error"),
    }
    parts = [f"{name}={value}" for name, value in said.items() if value]
    return f"{fate['group']}: {fate['state']}" + (f" ({', '.join(parts)})" if parts else "")


def _warn(answer: Mapping[str, Any]) -> None:
    if answer.get("has_more"):
        click.echo("there are more; raise --limit, or narrow --from and --to", err=True)
    if not answer["is_complete"]:
        click.echo(
            f"not everything was looked at: {answer.get('unsearched_bytes', 0)} bytes of the log are "
            "not indexed yet, or a bound was reached; ask again later, or narrow --from and --to",
            err=True,
        )


def _time(time_ms: int) -> str:
    try:
        return (_EPOCH + timedelta(milliseconds=time_ms)).isoformat(timespec="milliseconds")
    except OverflowError:
        return f"{time_ms} ms"


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    if len(line) <= _BODY_SHOWN_CHARACTERS:
        return line
    return line[: _BODY_SHOWN_CHARACTERS - 1] + "…"
