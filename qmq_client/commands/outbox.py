"""`qmq outbox list | show | retry | purge`: the rows that wait in one database, for people.

Nothing here sends; `retry` makes parked rows due again and the next sweep takes them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from qmq_client.commands.exit_codes import ATTENTION
from qmq_client.commands.settings import database_options, json_option, the_database
from qmq_client.database import database_errors, open_engine, section_tables
from qmq_client.errors import InvalidMessageError
from qmq_client.outbox.row import StoredRow
from qmq_client.outbox.store import OutboxStore
from qmq_client.outbox.table import LIVE, PARKED, SENT
from qmq_client.wire.message_id import format_message_id, parse_message_id

_STATE_NAMES: Final = {LIVE: "live", PARKED: "parked", SENT: "sent"}
_STATES: Final = {name: state for state, name in _STATE_NAMES.items()}
#: What `--state` of `list` takes: state and whether only rows whose time has come.
_LISTED: Final = {"live": (LIVE, False), "due": (LIVE, True), "parked": (PARKED, False)}
_COLUMNS: Final = ("message_id", "state", "subject", "attempts", "due_at", "last_error")
_ERROR_SHOWN_CHARACTERS: Final = 60

_ids_argument = click.argument("message_ids", nargs=-1, metavar="[MESSAGE_ID]...")


@click.group()
def outbox() -> None:
    """Look after the rows that wait in an outbox."""


@outbox.command("list")
@database_options
@click.option("--state", type=click.Choice(sorted(_LISTED)), help="Only these; all by default.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True)
@json_option
def list_(
    database: str | None, config_file: Path | None, state: str | None, limit: int, as_json: bool
) -> None:
    """List rows, those due first at the top."""
    number, is_due = (None, False) if state is None else _LISTED[state]
    with _store(database, config_file) as store:
        rows = store.list_rows(state=number, is_due=is_due, limit=limit)
        counts = store.counts()
    shown = [_shown(row) for row in rows]
    if as_json:
        totals = {"live": counts.live, "due": counts.due, "parked": counts.parked}
        click.echo(json.dumps({"rows": shown, "counts": totals}, indent=2))
        return
    if shown:
        click.echo("  ".join(_COLUMNS))
    for row in shown:
        row["last_error"] = (row["last_error"] or "")[:_ERROR_SHOWN_CHARACTERS]
        click.echo("  ".join(str(row[column]) for column in _COLUMNS))
    click.echo(f"live {counts.live}, of them due {counts.due}; parked {counts.parked}")


@outbox.command()
@database_options
@click.argument("message_id")
@json_option
def show(database: str | None, config_file: Path | None, message_id: str, as_json: bool) -> None:
    """Show all that is known of one row.

    Exit code 1 when it is not there.
    """
    with _store(database, config_file) as store:
        rows = store.list_rows(message_ids=[_parsed(message_id)])
    if not rows:
        click.echo(
            f"{message_id} is not in the outbox: sent and deleted, or never stored", err=True
        )
        raise SystemExit(ATTENTION)
    shown = _shown(rows[0])
    if as_json:
        click.echo(json.dumps(shown, indent=2))
        return
    for name, value in shown.items():
        click.echo(f"{name:<13} {'-' if value is None else value}")


@outbox.command()
@database_options
@_ids_argument
@click.option("--all", "is_all", is_flag=True, help="All parked rows.")
@json_option
def retry(
    database: str | None,
    config_file: Path | None,
    message_ids: tuple[str, ...],
    is_all: bool,
    as_json: bool,
) -> None:
    """Make parked rows due again.

    Their attempts are counted from the start.
    """
    ids = _chosen(message_ids, is_all)
    with _store(database, config_file) as store:
        count = store.retry(ids)
    _report("retried", count, as_json)


@outbox.command()
@database_options
@_ids_argument
@click.option("--all", "is_all", is_flag=True, help="All rows of that state.")
@click.option("--state", type=click.Choice(["live", "parked"]), default="parked", show_default=True)
@click.option("--older-than-s", type=click.FloatRange(min=0), default=0.0, help="Age in seconds.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def purge(
    database: str | None,
    config_file: Path | None,
    message_ids: tuple[str, ...],
    *,
    is_all: bool,
    state: str,
    older_than_s: float,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete rows: they are never sent."""
    ids = _chosen(message_ids, is_all)
    if not yes:
        what = f"all {state} rows" if ids is None else f"{len(ids)} rows"
        click.confirm(f"Delete {what} unsent?", abort=True, err=True)
    total = 0
    with _store(database, config_file) as store:
        while count := store.purge(
            state=_STATES[state], older_than_ms=round(older_than_s * 1000), message_ids=ids
        ):
            total += count
    _report("purged", total, as_json)


def _chosen(message_ids: tuple[str, ...], is_all: bool) -> list[bytes] | None:
    """The ids that were named, or None for all; neither or both is a wrong call."""
    if bool(message_ids) == is_all:
        raise click.UsageError("Give message ids, or --all.")
    return None if is_all else [_parsed(message_id) for message_id in message_ids]


def _parsed(message_id: str) -> bytes:
    try:
        return parse_message_id(message_id)
    except InvalidMessageError as error:
        raise InvalidMessageError(
            field=error.field,
            limit=error.limit,
            value=error.value,
            remedy="Take it from `qmq outbox list`.",
        ) from error


def _report(event: str, count: int, as_json: bool) -> None:
    click.echo(json.dumps({event: count}) if as_json else f"{event} {count}")


def _shown(row: StoredRow) -> dict[str, Any]:
    return {
        "message_id": format_message_id(row.message_id),
        "state": _STATE_NAMES.get(row.state, str(row.state)),
        "subject": row.subject,
        "ordering_key": row.ordering_key,
        "attempts": row.attempts,
        "due_at": _iso(row.due_at_ms),
        "created_at": _iso(row.created_at_ms),
        "is_owned": row.is_owned,
        "record_bytes": row.record_bytes,
        "last_error": row.last_error,
    }


def _iso(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")


@contextmanager
def _store(database: str | None, config_file: Path | None) -> Iterator[OutboxStore]:
    section = the_database(database, config_file)
    engine = open_engine(section, os.environ)
    with database_errors(section.name):
        store = OutboxStore(engine, section_tables(section))
        try:
            yield store
        finally:
            store.close()
            engine.dispose()
