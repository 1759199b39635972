"""`qmq broker token add | list | revoke`: the tokens of callers, kept in a file next to the broker.

The commands work without a running broker; a running one reads the file again within a second.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final

import click
import msgspec

from qmq_broker.errors import StoreError
from qmq_broker.face.authentication.access import Right, parse_right
from qmq_broker.face.authentication.outside_files import remove, write_new
from qmq_broker.face.authentication.token_file import TokenFileError, change_tokens, read_tokens
from qmq_broker.face.authentication.tokens import (
    TOKENS_MAX,
    TokenEntry,
    TokenList,
    digest_of,
    new_token,
)
from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.wire.shown import shorten

_DAY_MS: Final = 86_400_000
_REFUSED: Final = 1

_file_option = click.option(
    "--tokens",
    "path",
    required=True,
    metavar="FILE",
    help="The file for `qmq broker serve --tokens`; `add` creates it.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


@click.group()
def token() -> None:
    """Make, list and revoke the tokens of a broker."""


def _rights(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> tuple[Right, ...]:
    try:
        return tuple(parse_right(text) for text in given)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@token.command()
@click.argument("name")
@_file_option
@click.option(
    "--role",
    "rights",
    multiple=True,
    required=True,
    metavar="ROLE[:SUBJECTS]",
    callback=_rights,
    help="producer, consumer or admin; SUBJECTS is a subject, a prefix followed by *, or * (default). "
    "May be repeated.",
)
@click.option(
    "--days",
    type=click.IntRange(1, 36_500),
    help="Days until it expires; by default it never does.",
)
@click.option(
    "--certificate",
    default="",
    metavar="CN",
    help="Make no token; give the roles to client certificates with this name.",
)
@click.option(
    "--out",
    metavar="FILE",
    help="Write the token to this new file, readable only by its owner, instead of printing it.",
)
@_json_option
def add(
    *,
    name: str,
    path: str,
    rights: tuple[Right, ...],
    days: int | None,
    certificate: str,
    out: str | None,
    as_json: bool,
) -> None:
    """Make a token for NAME and print it, or write it to a file; it is stored nowhere else.

    Exit codes: 0 made, 1 a file cannot be read or written, 2 wrong call.
    """
    if out is not None and certificate:
        raise click.UsageError(
            "--out with --certificate: a certificate has no token to be written. Leave out one of the two."
        )
    token_id, text = new_token()
    now_ms = SYSTEM_CLOCK.now_ms()
    entry = TokenEntry(
        id=token_id,
        name=name,
        rights=rights,
        digest="" if certificate else digest_of(text).hex(),
        certificate=certificate,
        made_at_ms=now_ms,
        ends_at_ms=0 if days is None else now_ms + days * _DAY_MS,
    )
    try:
        # A struct is not checked at construction, so check it here: the file must stay readable.
        msgspec.convert(msgspec.to_builtins(entry), TokenEntry)
    except msgspec.ValidationError as error:
        rule = f"NAME {shorten(name)}: use 1 to 63 characters of A-Z a-z 0-9 _ . @ -"
        raise click.UsageError(rule if "$.name" in str(error) else str(error)) from error
    with _secret_written(out, text):
        _change(path, lambda listed: _with(listed, entry))
    is_shown = not certificate and out is None
    if as_json:
        click.echo(json.dumps({"id": token_id, "name": name, "token": text if is_shown else None}))
        return
    click.echo(f"{name} is {', '.join(map(str, rights))}; id {token_id}", err=True)
    if is_shown:
        click.echo(text)


@token.command(name="list")
@_file_option
@_json_option
def list_tokens(path: str, as_json: bool) -> None:
    """List tokens and certificates. The secrets are not stored, so they cannot be shown.

    Exit codes: 0 listed, 1 the file cannot be read, 2 wrong call.
    """
    try:
        entries = read_tokens(path).tokens
    except TokenFileError as error:
        _fail(error)
    if as_json:
        click.echo(json.dumps({"tokens": [_shown(entry) for entry in entries]}))
        return
    if not entries:
        click.echo("none")
    for entry in entries:
        shown = _shown(entry)
        kind = f"certificate {entry.certificate}" if entry.certificate else "token"
        until = " until" if shown["state"] == "valid" else ""
        end = f", {shown['state']}" + (f"{until} {shown['ends_at']}" if shown["ends_at"] else "")
        click.echo(f"{entry.id}  {entry.name}  {' '.join(shown['roles'])}  {kind}{end}")


@token.command()
@click.argument("token_id", metavar="ID")
@_file_option
@_json_option
def revoke(token_id: str, path: str, as_json: bool) -> None:
    """Revoke the token with this id. Requests in progress are still answered.

    Exit codes: 0 revoked, 1 there is no such token or the file cannot be written, 2 wrong call.
    """
    _change(path, lambda listed: _without(listed, token_id))
    click.echo(json.dumps({"revoked": token_id}) if as_json else f"revoked {token_id}")


def _with(listed: TokenList, entry: TokenEntry) -> TokenList:
    if len(listed.tokens) >= TOKENS_MAX:
        raise click.ClickException(
            f"there are {len(listed.tokens)} tokens; allowed: {TOKENS_MAX}. Revoke unused ones."
        )
    if entry.certificate in {one.certificate for one in listed.tokens if one.certificate}:
        raise click.ClickException(
            f"certificate {entry.certificate} is listed already. Revoke it first."
        )
    return TokenList(tokens=(*listed.tokens, entry))


def _without(listed: TokenList, token_id: str) -> TokenList:
    left = tuple(entry for entry in listed.tokens if entry.id != token_id)
    if len(left) == len(listed.tokens):
        raise click.ClickException(
            f"there is no token with id {token_id}. `qmq broker token list` lists them."
        )
    return TokenList(tokens=left)


def _change(path: str, change: Any) -> None:
    try:
        change_tokens(path, change)
    except (TokenFileError, StoreError) as error:
        _fail(error)


@contextmanager
def _secret_written(path: str | None, text: str) -> Iterator[None]:
    """Write the secret before the token becomes valid; the file is removed if that fails."""
    if path is None:
        yield
        return
    _write_secret(path, text)
    try:
        yield
    except (click.ClickException, SystemExit):
        remove(path)
        raise


def _write_secret(path: str, text: str) -> None:
    try:
        write_new(path, f"{text}\n".encode())
    except FileExistsError as error:
        _fail_of(path, error, "give --out a file that does not exist yet")
    except OSError as error:
        _fail_of(path, error, "give --out a writable file")


def _fail_of(path: str, error: OSError, remedy: str) -> Any:
    click.echo(f"Error: {path}: {error.strerror}; {remedy}", err=True)
    sys.exit(_REFUSED)


def _fail(error: Exception) -> Any:
    click.echo(f"Error: {error}", err=True)
    sys.exit(_REFUSED)


def _shown(entry: TokenEntry) -> dict[str, Any]:
    is_valid = entry.is_valid(SYSTEM_CLOCK.now_ms())
    return {
        "id": entry.id,
        "name": entry.name,
        "roles": [str(right) for right in entry.rights],
        "certificate": entry.certificate or None,
        "state": "valid" if is_valid else "ended",
        "made_at": _time(entry.made_at_ms),
        "ends_at": _time(entry.ends_at_ms),
    }


def _time(at_ms: int) -> str | None:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat("T", "seconds") if at_ms else None
