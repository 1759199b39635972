"""`qmq outbox list | show | retry | purge`: the rows of one database's outbox.

None of these commands sends; `retry` makes parked rows due again for the next sweep.

Only the beginning of a body is shown, and control characters in a message cannot move the terminal's cursor.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from qmq_client.commands.exit_codes import ATTENTION
from qmq_client.commands.named import MESSAGE_ID
from qmq_client.commands.settings import database_options, json_option, the_database
from qmq_client.commands.table import table_lines
from qmq_client.database.engine import open_engine, section_tables
from qmq_client.database.errors import database_errors
from qmq_client.database.registry import Registry
from qmq_client.errors import ConfigurationError, QmqError
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.row import ROW_FILTER_IDS_MAX, RowFilter, StoredRow
from qmq_client.outbox.table import LIVE, PARKED, SENT
from qmq_client.settings.sections import Config, DatabaseSection
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.message_id import format_message_id, parse_message_id
from qmq_client.wire.record import BodyKind, Record, decode_record
from qmq_client.wire.shown import printable

STATE_NAMES: Final = {LIVE: "live", PARKED: "parked", SENT: "sent"}
_COLUMNS: Final = ("message_id", "state", "subject", "attempts", "due_at", "last_error")
_ERROR_SHOWN_CHARACTERS: Final = 60
#: Characters of a body that are shown, enough to recognize a message; of bytes, the first ones are shown as hex digits.
BODY_SHOWN_BYTES: Final = 4_096
_HEX_SHOWN_BYTES: Final = 64


def row_values(row: StoredRow) -> dict[str, Any]:
    """The values of a row's columns."""
    return {
        "message_id": format_message_id(row.message_id),
        "state": STATE_NAMES.get(row.state, str(row.state)),
        "subject": row.subject,
        "ordering_key": row.ordering_key,
        "attempts": row.attempts,
        "due_at": _iso(row.due_at_ms),
        "created_at": _iso(row.created_at_ms),
        "is_owned": row.is_owned,
        "record_bytes": row.record_bytes,
        "last_error": row.last_error,
    }


def record_values(row: StoredRow, data: bytes) -> dict[str, Any]:
    """The contents of a row's record, or the reason why it cannot be read."""
    try:
        record = decode_record(row.subject, data)
    except ProtocolError as error:
        return {"damage": str(error), "record_hex": data[:_HEX_SHOWN_BYTES].hex()}
    values: dict[str, Any] = {
        "key": record.key,
        "tags": list(record.tags),
        "headers": dict(record.headers),
        "born_at": _iso(record.born_at_ms),
        "deliver_at": None if record.due_at_ms is None else _iso(record.due_at_ms),
        "body_kind": record.body_kind.name.lower(),
        "body_bytes": len(record.body),
        **_body(record),
    }
    if record.message_id != row.message_id:
        said = format_message_id(record.message_id)
        values["damage"] = f"the record is that of message {said}"
    return values


def _body(record: Record) -> dict[str, Any]:
    """The beginning of the body, as text if possible; JSON as it was written."""
    shown = record.body[:BODY_SHOWN_BYTES]
    is_whole = len(shown) == len(record.body)
    if record.body_kind is not BodyKind.BYTES:
        # A character that the limit cuts in two is left out.
        text = shown.decode("utf-8", errors="replace" if is_whole else "ignore")
        return {"body": text, "is_body_whole": is_whole}
    digits = record.body[:_HEX_SHOWN_BYTES].hex()
    return {"body_hex": digits, "is_body_whole": len(record.body) <= _HEX_SHOWN_BYTES}


def row_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The rows as a table, with the beginning of each error."""
    return table_lines(_COLUMNS, [[_cell(row, column) for column in _COLUMNS] for row in rows])


def _cell(row: dict[str, Any], column: str) -> object:
    if column == "last_error":
        text = printable(row[column] or "")
        is_whole = len(text) <= _ERROR_SHOWN_CHARACTERS
        return text if is_whole else f"{text[: _ERROR_SHOWN_CHARACTERS - 1]}…"
    return row[column]


def detail_lines(values: dict[str, Any]) -> Iterator[str]:
    """One line for each known fact about a row."""
    for name, value in values.items():
        if name == "headers":
            yield from (
                f"{'header':<13} {printable(f'{header}: {text}')}" for header, text in value.items()
            )
            continue
        text = ", ".join(value) if isinstance(value, list) else value
        is_empty = text is None or text == ""
        yield f"{name:<13} {'-' if is_empty else printable(str(text))}"


def _iso(time_ms: int) -> str:
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (
        OverflowError,
        ValueError,
        OSError,
    ):  # a value that was written by hand, not from a clock
        return f"{time_ms} ms"


_STATES: Final = {name: state for state, name in STATE_NAMES.items()}
#: The values of `--state` of `list`: the state, and whether only due rows.
_LISTED: Final = {
    "live": (LIVE, False),
    "due": (LIVE, True),
    "parked": (PARKED, False),
    "sent": (SENT, False),
}
#: Rows are counted up to this number; more are shown as "at least".
_COUNTED_ROWS_MAX: Final = 100_000

#: Seconds of each unit of `--older-than`.
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])\Z")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Duration(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """`90s`, `15m`, `2h`, `7d`; as milliseconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = _DURATION.match(value)
        if found is None:
            self.fail(f"{value!r} is not a duration; write 90s, 15m, 2h or 7d", param, ctx)
        return round(float(found[1]) * _UNITS_S[found[2]] * 1000)


def _filter_options(function: _Function) -> _Function:
    """Add the filters for rows; a row must match all given filters."""
    options = (
        click.option("--subject", default="", help="Only rows of this subject."),
        click.option(
            "--error", metavar="TEXT", default="", help="Only rows whose last error contains this."
        ),
        click.option(
            "--older-than",
            "older_than_ms",
            type=_Duration(),
            metavar="DURATION",
            default=0,
            help="Only rows older than this: 90s, 15m, 2h, 7d.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


_ids_argument = click.argument("message_ids", type=MESSAGE_ID, nargs=-1, metavar="[MESSAGE_ID]...")


@click.group()
def outbox() -> None:
    """List, show, retry or purge the rows of an outbox."""


@outbox.command("list")
@database_options
@click.option(
    "--state", type=click.Choice(sorted(_LISTED)), help="Only rows in this state; all by default."
)
@_filter_options
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    default=100,
    show_default=True,
    help="Maximum number of rows.",
)
@json_option
def list_(
    database: str | None,
    config_file: Path | None,
    *,
    state: str | None,
    limit: int,
    as_json: bool,
    **chosen: Any,
) -> None:
    """List rows, the earliest due first, and count rows by state."""
    number, is_due = (None, False) if state is None else _LISTED[state]
    rows_filter = RowFilter(**chosen)
    with open_outbox(the_database(database, config_file)) as store:
        rows = store.list_rows(rows_filter, state=number, is_due=is_due, limit=limit)
        fitting = store.count_rows(
            rows_filter, state=number, is_due=is_due, rows_max=_COUNTED_ROWS_MAX
        )
        counts = store.counts(rows_max=_COUNTED_ROWS_MAX)
        sent = store.count_rows(state=SENT, rows_max=_COUNTED_ROWS_MAX)
    shown = [row_values(row) for row in rows]
    totals = {"live": counts.live, "due": counts.due, "parked": counts.parked, "sent": sent}
    if as_json:
        more = {"has_more": fitting > len(shown)}
        click.echo(json.dumps({"rows": shown, "counts": totals, **more}, indent=2))
        return
    for line in row_lines(shown):
        click.echo(line)
    if fitting > len(shown):
        click.echo(f"{len(shown)} of {_counted(fitting)} rows; --limit shows more")
    live, due, parked, sent_rows = map(_counted, totals.values())
    click.echo(f"live {live}, of them due {due}; parked {parked}; sent {sent_rows}")


@outbox.command()
@database_options
@click.argument("message_id", type=MESSAGE_ID)
@json_option
def show(database: str | None, config_file: Path | None, message_id: str, as_json: bool) -> None:
    """Show one row and its message.

    A long body is cut. Exit code 1 when the row does not exist.
    """
    with open_outbox(the_database(database, config_file)) as store:
        rows = store.list_rows(RowFilter(message_ids=[parse_message_id(message_id)]))
        record = store.read_record(rows[0].message_id) if rows else None
    if record is None:
        click.echo(
            f"{message_id} is not in the outbox: sent and deleted, or never stored; "
            "`qmq message show` also searches the broker",
            err=True,
        )
        raise SystemExit(ATTENTION)
    shown = row_values(rows[0]) | record_values(rows[0], record)
    if as_json:
        click.echo(json.dumps(shown, indent=2))
        return
    for line in detail_lines(shown):
        click.echo(line)


@outbox.command()
@database_options
@_ids_argument
@_filter_options
@click.option("--all", "is_all", is_flag=True, help="All parked rows.")
@json_option
def retry(
    database: str | None,
    config_file: Path | None,
    *,
    message_ids: tuple[str, ...],
    is_all: bool,
    as_json: bool,
    **filters: Any,
) -> None:
    """Make parked rows due again, so that they are sent.

    Their attempts are counted from the start. A row that is parked meanwhile waits for the next
    call. Exit code 1 when a named row is not parked.
    """
    chosen = _chosen(message_ids, is_all, filters)
    with open_outbox(the_database(database, config_file)) as store:
        total = store.retry(chosen)
    _report("retried", total, chosen, as_json)


@outbox.command()
@database_options
@_ids_argument
@_filter_options
@click.option("--all", "is_all", is_flag=True, help="All rows in that state.")
@click.option(
    "--state",
    type=click.Choice(["live", "parked"]),
    default="parked",
    show_default=True,
    help="Only rows in this state.",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
def purge(
    database: str | None,
    config_file: Path | None,
    *,
    message_ids: tuple[str, ...],
    is_all: bool,
    state: str,
    yes: bool,
    as_json: bool,
    **filters: Any,
) -> None:
    """Delete rows; their messages will never be sent.

    Exit code 1 when a named row does not exist in this state.
    """
    chosen = _chosen(message_ids, is_all, filters)
    if as_json and not yes:
        raise ConfigurationError(
            setting="--yes",
            value="not given, and --json does not ask",
            remedy="Check with `qmq outbox list`, then give --yes.",
        )
    section, number = the_database(database, config_file), _STATES[state]
    with open_outbox(section) as store:
        if not yes:
            count = store.count_rows(chosen, state=number, rows_max=_COUNTED_ROWS_MAX)
            rows = f"{_counted(count)} {state} {'row' if count == 1 else 'rows'}"
            question = f"Delete {rows} of database {section.name} unsent?"
            click.confirm(question, abort=True, err=True)
        total = store.purge(chosen, state=number)
    _report("purged", total, chosen, as_json)


def _chosen(message_ids: tuple[str, ...], is_all: bool, filters: dict[str, Any]) -> RowFilter:
    """The chosen rows; all of them only with --all."""
    if not (message_ids or is_all or any(filters.values())) or (message_ids and is_all):
        raise click.UsageError("Give message ids, a filter (--subject, --error, …), or --all.")
    if len(message_ids) > ROW_FILTER_IDS_MAX:
        raise click.UsageError(
            f"message ids: {len(message_ids)}; allowed: {ROW_FILTER_IDS_MAX}. Give fewer, or a filter."
        )
    ids = [parse_message_id(message_id) for message_id in message_ids] or None
    return RowFilter(message_ids=ids, **filters)


def _report(event: str, count: int, chosen: RowFilter, as_json: bool) -> None:
    """Print how many rows were changed, and whether every named row was found."""
    click.echo(json.dumps({event: count}) if as_json else f"{event} {count}")
    named = len(set(chosen.message_ids or ()))
    is_narrowed = chosen.subject or chosen.error or chosen.older_than_ms
    if count >= (min(named, 1) if is_narrowed else named):
        return
    click.echo(
        f"{named - count} of {named} ids have no row in that state; see `qmq outbox show ID`",
        err=True,
    )
    raise SystemExit(ATTENTION)


def _counted(count: int) -> str:
    return f"at least {count}" if count >= _COUNTED_ROWS_MAX else str(count)


@contextmanager
def open_outbox(section: DatabaseSection) -> Iterator[OutboxStore]:
    """The outbox of one database; failures become the errors of this package."""
    engine = open_engine(section, os.environ)
    with database_errors(section.name):
        store = OutboxStore(engine, section_tables(section))
        try:
            yield store
        finally:
            store.close()
            engine.dispose()


@dataclass(kw_only=True)
class RowsFound:
    """The rows of a message in several outboxes."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    #: Names of the databases that were read.
    read: list[str] = field(default_factory=list)
    #: Names of the databases that could not be read.
    unread: list[str] = field(default_factory=list)

    def could_not_read(self, name: str, error: QmqError) -> None:
        """Record the database, and print the reason on standard error."""
        click.echo(f"{name}: {error}", err=True)
        self.unread.append(name)


def rows_of_message(message_id: bytes, config: Config) -> RowsFound:
    """The rows of a message in all databases of the configuration and of its registry."""
    found = RowsFound()
    for section in _all_databases(config, found):
        try:
            with open_outbox(section) as store:
                rows = store.list_rows(RowFilter(message_ids=[message_id]))
        except QmqError as error:  # the others are read nevertheless
            found.could_not_read(section.name, error)
            continue
        found.read.append(section.name)
        found.rows += [{"database": section.name, **row_values(row)} for row in rows]
    return found


def _all_databases(config: Config, found: RowsFound) -> Iterable[DatabaseSection]:
    """All databases; one of the configuration replaces one of the registry with the same name."""
    sections = {section.name: section for section in config.databases}
    if not config.registry.url:
        return sections.values()
    try:
        content = Registry(config.registry, os.environ).read()
    except QmqError as error:
        found.could_not_read("[registry]", error)
        return sections.values()
    for name, refused in content.refused.items():
        found.could_not_read(name, refused)
    return ({each.name: each for each in content.enabled()} | sections).values()


def row_text(row: dict[str, Any]) -> str:
    """The state of this row in one line, which explains why its message is not at the broker."""
    told = f"{row['message_id']} is in the outbox of {row['database']}: {row['state']}"
    told += f", due {row['due_at']}, attempts {row['attempts']}"
    return told + (f", last error: {printable(row['last_error'])}" if row["last_error"] else "")
