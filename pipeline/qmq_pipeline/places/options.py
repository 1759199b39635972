"""Parser of the options of the Spark sources; checks names and values before anything is opened.

Spark ignores unknown options, so a misspelt filter would select everything. Here an unknown option
is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, TypeVar

from qmq_client.transport.address import BrokerAddress
from qmq_client.wire.names import is_name
from qmq_client.wire.record import TIME_MAX_MS
from qmq_pipeline.errors import OptionError
from qmq_pipeline.places.outage import WAIT_S, WAIT_S_MAX
from qmq_pipeline.tables.schemas import ACTIONS, LOG, MESSAGES, SCHEDULED
from qmq_pipeline.tables.table import Table

_Value = TypeVar("_Value")
_TABLES: Final = {table.name: table for table in (MESSAGES, ACTIONS, SCHEDULED, LOG)}
_SWITCH: Final = {"on": True, "off": False}
_PASS: Final = {"pass": True, "fail": False}
#: A part of a log becomes a folder of a table. 64 MiB hold some hundred thousand messages: a log of 100 GB has
#: 1,500 parts, and a run that continues in the middle of a part rewrites few messages.
PART_BYTES: Final = 64 * 1024 * 1024
_OFFSET_MAX: Final = 2**63 - 1
#: No valid number of any option has more digits.
_DIGITS_MAX: Final = 20
#: A time written as a number is 0 for the beginning, or milliseconds from the year 2000 to 2286. This refuses dates
#: without hyphens (20261123, 20261123120000), seconds and microseconds, which would select everything or nothing.
_NUMBER_FIRST_MS: Final = 946_684_800_000
_NUMBER_NEXT_MS: Final = 10**13
_RANGE_BYTES_MIN: Final = 16 * 1024
_RANGE_BYTES_MAX: Final = 2**40
#: Options with the credentials for a broker.
BROKER_OPTIONS: Final = ("token", "token_file", "ca_file", "cert_file", "key_file")
LOG_OPTIONS: Final = (
    "path",
    "broker_url",
    *BROKER_OPTIONS,
    "wait_s",
    "table",
    "subject",
    "columns",
    "first_offset",
    "next_offset",
    "since",
    "until",
    "partition_bytes",
    "max_bytes_per_trigger",
    "pushdown",
    "quarantined",
    "expired",
    "whole_parts",
    "sealed",
    "part_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the logs are: a directory or a broker."""

    path: str | None = None
    broker_url: str | None = None
    #: The token that identifies the caller to the broker, and certificates for TLS; see `BrokerAddress`.
    token: str = ""
    token_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    #: How long, in one outage, each reader waits for an unreachable broker before it fails.
    wait_s: float = WAIT_S

    @property
    def address(self) -> BrokerAddress:
        """The broker. Requires: `broker_url` is set."""
        return BrokerAddress(
            url=self.broker_url or "",
            token=self.token,
            token_file=self.token_file,
            ca_file=self.ca_file,
            cert_file=self.cert_file,
            key_file=self.key_file,
        )

    @property
    def name(self) -> str:
        """The place as error texts and logs name it; contains no secrets."""
        return self.path or self.broker_url or ""

    def __repr__(self) -> str:
        return f"Place({self.name})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Options of the format `qmq`, checked."""

    place: Place
    table: Table = MESSAGES
    columns: tuple[str, ...] = MESSAGES.names
    subjects: frozenset[str] | None = None
    #: Only frames that begin at `first_offset` or later and before `next_offset`; None for no bound.
    first_offset: int | None = None
    next_offset: int | None = None
    #: Frames that begin below this may be left out. Retention may already have deleted this offset.
    skip_below_offset: int = 0
    first_stored_at_ms: int = 0
    next_stored_at_ms: int = TIME_MAX_MS
    #: Bytes of log in one partition; None chooses by the length of the log.
    partition_bytes: int | None = None
    #: Bytes of log in one micro-batch; None for no limit.
    batch_bytes_max: int | None = None
    takes_filters: bool = False
    #: Whether to skip ranges that the broker has in quarantine, instead of failing.
    passes_quarantined: bool = False
    #: Whether a stream skips a range that retention has deleted, instead of failing.
    passes_expired: bool = False
    #: Whether a micro-batch begins at the start of the part in which the previous one ended.
    has_whole_parts: bool = False
    #: Whether a stream reads segments only once they are full.
    is_sealed: bool = False
    #: Maximum bytes of log in one part.
    part_bytes_max: int = PART_BYTES


def parse_log_options(given: Mapping[str, str]) -> LogOptions:
    """Parse the options of `spark.read.format("qmq")`; raises `OptionError`."""
    options = known_options(given, LOG_OPTIONS)
    table = _choice(options, "table", _TABLES, MESSAGES)
    first_offset = _optional(options, "first_offset", _offset)
    next_offset = _optional(options, "next_offset", _offset)
    since_ms = _optional(options, "since", parse_time_ms) or 0
    until_ms = _optional(options, "until", parse_time_ms)
    _check_order(options, ("first_offset", first_offset), ("next_offset", next_offset))
    _check_order(options, ("since", since_ms), ("until", until_ms))
    return LogOptions(
        place=_place(options),
        table=table,
        columns=parse_columns(options.get("columns"), table),
        subjects=_subjects(options.get("subject")),
        first_offset=first_offset,
        next_offset=next_offset,
        first_stored_at_ms=since_ms,
        next_stored_at_ms=TIME_MAX_MS if until_ms is None else until_ms,
        partition_bytes=_optional(options, "partition_bytes", _range_bytes),
        batch_bytes_max=_optional(options, "max_bytes_per_trigger", _range_bytes),
        takes_filters=_choice(options, "pushdown", _SWITCH, False),
        passes_quarantined=_choice(options, "quarantined", _PASS, False),
        passes_expired=_choice(options, "expired", _PASS, False),
        has_whole_parts=_choice(options, "whole_parts", _SWITCH, False),
        is_sealed=_choice(options, "sealed", _SWITCH, False),
        part_bytes_max=_optional(options, "part_bytes", _range_bytes) or PART_BYTES,
    )


def parse_columns(text: str | None, table: Table) -> tuple[str, ...]:
    """Parse column names, separated by commas; no text means all columns of the table."""
    if not text:
        return table.names
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in table.names:
            raise _unknown("columns", name, table.names)
    if not names:
        raise OptionError(
            option="columns",
            value=f"{text!r} names no column",
            allowed=", ".join(table.names),
            remedy="Name some, separated by commas, or leave the option out for all.",
        )
    if len(set(names)) != len(names):
        raise OptionError(
            option="columns", value=text, allowed="each name once", remedy="Name each column once."
        )
    return names


def parse_time_ms(option: str, text: str) -> int:
    """Parse ISO 8601, UTC if it has no zone, or milliseconds since 1970. Raises `OptionError`."""
    if text.isdecimal():
        return _number_time_ms(option, text)
    try:
        time = datetime.fromisoformat(text)
        time_ms = round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
    except ValueError:
        time_ms = -1
    if not 0 <= time_ms <= TIME_MAX_MS:
        raise OptionError(
            option=option,
            value=text,
            allowed="a time like 2026-01-31T12:00:00Z, or milliseconds since 1970",
            remedy="Write it in one of these forms.",
        )
    return time_ms


def _number_time_ms(option: str, text: str) -> int:
    time_ms = int(text) if len(text) <= _DIGITS_MAX else _NUMBER_NEXT_MS
    if time_ms and not _NUMBER_FIRST_MS <= time_ms < _NUMBER_NEXT_MS:
        raise OptionError(
            option=option,
            value=text,
            allowed=f"a number is milliseconds since 1970, from {_NUMBER_FIRST_MS} (the year 2000) to "
            f"{_NUMBER_NEXT_MS - 1}, or 0 for the beginning",
            remedy="Write a date as 2026-01-31, or with its time as 2026-01-31T12:00:00Z.",
        )
    return time_ms


def known_options(given: Mapping[str, str], known: tuple[str, ...]) -> dict[str, str]:
    """The options by their names in snake_case: Spark ignores case, and its own sources use camelCase."""
    spelled = {name.replace("_", ""): name for name in known}
    options: dict[str, str] = {}
    for name, value in given.items():
        ours = spelled.get(name.lower().replace("_", ""))
        if ours is None:
            raise _unknown("of the source", name, known)
        options[ours] = value
    return options


def _place(options: Mapping[str, str]) -> Place:
    path, broker_url = options.get("path"), options.get("broker_url")
    if bool(path) == bool(broker_url):
        raise OptionError(
            option="path",
            value="both given" if path else "neither path nor broker_url is given",
            allowed="one of path and broker_url",
            remedy="Give the data directory as path, or the broker's address as broker_url.",
        )
    wait_s = _optional(options, "wait_s", _wait_s)
    return Place(
        path=path or None,
        broker_url=broker_url or None,
        wait_s=WAIT_S if wait_s is None else wait_s,
        **{name: options.get(name, "") for name in BROKER_OPTIONS},
    )


def _subjects(text: str | None) -> frozenset[str] | None:
    if not text:
        return None
    names = frozenset(name.strip() for name in text.split(","))
    for name in names:
        if not is_name(name):
            raise OptionError(
                option="subject",
                value=repr(name),
                allowed="names of subjects, separated by commas",
                remedy="`qmq subjects` lists them.",
            )
    return names


def _choice(
    options: Mapping[str, str], option: str, choices: Mapping[str, _Value], default: _Value
) -> _Value:
    text = options.get(option)
    if text is None:
        return default
    if text not in choices:
        raise _unknown(option, text, tuple(choices))
    return choices[text]


def _optional(
    options: Mapping[str, str], option: str, parse: Callable[[str, str], int]
) -> int | None:
    text = options.get(option)
    return None if text is None else parse(option, text)


def _check_order(
    options: Mapping[str, str], low: tuple[str, int | None], high: tuple[str, int | None]
) -> None:
    """Refuse a range that ends before it begins, which is a mistake; an empty range is allowed."""
    (first, begin), (after, end) = low, high
    if begin is None or end is None or begin <= end:
        return
    raise OptionError(
        option=after,
        value=f"{options[after]}, and {first} is {options[first]}",
        allowed=f"what is not before {first}",
        remedy=f"Give a later {after}, or an earlier {first}.",
    )


def _offset(option: str, text: str) -> int:
    return number_option(option, text, 0, _OFFSET_MAX)


def _wait_s(option: str, text: str) -> int:
    return number_option(option, text, 0, int(WAIT_S_MAX), unit="seconds")


def _range_bytes(option: str, text: str) -> int:
    return number_option(option, text, _RANGE_BYTES_MIN, _RANGE_BYTES_MAX)


def number_option(option: str, text: str, lowest: int, highest: int, unit: str = "bytes") -> int:
    """Parse a whole number within bounds; raises `OptionError`."""
    # `isdecimal`, because `int` refuses a superscript, which `isdigit` accepts; `int` also refuses thousands of digits.
    number = int(text) if text.isdecimal() and len(text) <= _DIGITS_MAX else -1
    if not lowest <= number <= highest:
        raise OptionError(
            option=option,
            value=text,
            allowed=f"a number from {lowest} to {highest}",
            remedy=f"Write it in {unit}, in digits.",
        )
    return number


def _unknown(option: str, value: str, known: tuple[str, ...]) -> OptionError:
    near = difflib.get_close_matches(value, known, n=1)
    remedy = f"Did you mean {near[0]}?" if near else "Choose one of these."
    return OptionError(option=option, value=value, allowed=", ".join(known), remedy=remedy)
