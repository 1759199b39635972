"""Parser of the options of the format `qmq_outbox`; checks names and values before a database is opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from qmq_client.errors import ConfigurationError
from qmq_client.settings.config import load_config
from qmq_client.settings.sections import DatabaseSection
from qmq_pipeline.errors import OptionError
from qmq_pipeline.places.options import known_options, number_option
from qmq_pipeline.tables.schemas import OUTBOX

#: Rows that one task reads.
RANGE_ROWS: Final = 200_000
#: The mark of a scan stays below rows younger than this, because a row with a lower id may commit later.
OUTBOX_SAFETY_S: Final = 600
#: Blanks separate databases, because a URL has none.
OUTBOX_OPTIONS: Final = (
    "url",
    "database",
    "config",
    "table_prefix",
    "schema",
    "partition_rows",
    "safety_s",
    "sections_with_token",
)
_ROWS_MAX: Final = 100_000_000
_SAFETY_S_MAX: Final = 10 * 365 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxOptions:
    """Options of the format `qmq_outbox`, checked."""

    #: Sorted by name; a stream's offset has one entry for each.
    sections: tuple[DatabaseSection, ...]
    columns: tuple[str, ...]
    partition_rows: int
    safety_ms: int


def parse_outbox_options(
    given: Mapping[str, str], environment: Mapping[str, str], columns: Sequence[str]
) -> OutboxOptions:
    """Parse the options of `spark.read.format("qmq_outbox")`; raises `OptionError`.

    `columns` are those of the schema, which the user may have narrowed.
    """
    options = known_options(given, OUTBOX_OPTIONS)
    for name in columns:
        if name not in OUTBOX.names:
            raise OptionError(
                option="schema",
                value=name,
                allowed=", ".join(OUTBOX.names),
                remedy="Choose one of these.",
            )
    safety_s = _number(options, "safety_s", 0, _SAFETY_S_MAX, "seconds")
    return OutboxOptions(
        sections=_sections(options, environment),
        columns=tuple(columns),
        partition_rows=_number(options, "partition_rows", 1, _ROWS_MAX, "rows") or RANGE_ROWS,
        safety_ms=(OUTBOX_SAFETY_S if safety_s is None else safety_s) * 1000,
    )


def _sections(
    options: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[DatabaseSection, ...]:
    """The databases to read: by URL, by name in `qmq.toml`, or all configured ones.

    The jobs of `qmq pipeline` pass whole sections in `sections_with_token`: Spark shows options in its
    plans, except those whose names suggest a secret.
    """
    if (given := options.get("sections_with_token")) is not None:
        return tuple(msgspec.json.decode(given, type=list[DatabaseSection]))
    named = [
        *options.get("url", "").split(),
        *options.get("database", "").replace(",", " ").split(),
    ]
    config = options.get("config")
    try:
        loaded = load_config(
            environment=environment, file=Path(config) if config else None, databases=named
        )
    except ConfigurationError as error:
        raise _of_option(options, error) from error
    sections = loaded.config.databases
    if not sections:
        raise OptionError(
            option="url",
            value="no database is given, and none is configured",
            allowed="SQLAlchemy URLs, separated by blanks; or names of configured databases",
            remedy="Give one as the option url.",
        )
    changes = {name: options[name] for name in ("table_prefix", "schema") if name in options}
    changed = (msgspec.structs.replace(one, **changes) for one in sections)
    return tuple(sorted(changed, key=lambda one: one.name))


def _of_option(
    options: Mapping[str, str], error: ConfigurationError
) -> OptionError | ConfigurationError:
    """The error for the option that names the database; unchanged if no option names it."""
    for option in ("url", "database"):
        if error.setting in options.get(option, "").replace(",", " ").split():
            return OptionError(
                option=option,
                value=f"{error.setting} is not known",
                allowed="SQLAlchemy URLs, or names of configured databases",
                remedy=error.remedy,
            )
    return error


def _number(
    options: Mapping[str, str], option: str, lowest: int, highest: int, unit: str
) -> int | None:
    text = options.get(option)
    return None if text is None else number_option(option, text, lowest, highest, unit)
