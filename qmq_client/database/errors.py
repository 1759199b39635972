"""Translates errors of SQLAlchemy and the drivers into errors of this package, without passwords."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import sqlalchemy as sa

from qmq_client.errors import DatabaseUnavailableError, OutboxMissingError
from qmq_client.settings.masking import mask_secrets

_ERROR_CHARACTERS_MAX: Final = 300
#: Codes for a missing table, column or schema; drivers have no common error for these.
_MISSING_CODES: Final = (1146, 1054, "42P01", "42703", "3F000")
#: MySQL's code for a missing schema, and for a URL's database, which a migration does not create.
#: MariaDB reports the table instead if a statement names the schema.
_NO_DATABASE: Final = 1049
#: PostgreSQL then shows the row, and with it the message.
_WHOLE_ROW: Final = "DETAIL:  Failing row contains"
_MISSING_IN_SQLITE: Final = ("no such table", "no such column")


@contextmanager
def database_errors(name: str, *, remedy: str = "Run `qmq db migrate` for it.") -> Iterator[None]:
    """Translate exceptions of the database library within the block into errors of this package.

    `remedy` creates the missing tables.
    """
    try:
        yield
    except sa.exc.SQLAlchemyError as error:
        reason = _reason(error)
        if _is_missing(error):
            raise OutboxMissingError(f"database {name}: {reason}. {remedy}") from error
        raise DatabaseUnavailableError(f"database {name}: {reason}") from error


def _is_missing(error: sa.exc.SQLAlchemyError) -> bool:
    if not isinstance(error, sa.exc.DBAPIError) or error.orig is None:
        return False
    origin = error.orig
    first = origin.args[0] if origin.args else ""
    if first == _NO_DATABASE:
        return error.statement is not None
    # PyMySQL reports both, and its numbers are more precise.
    codes = (first, getattr(origin, "sqlstate", None))
    return any(code in _MISSING_CODES for code in codes) or str(first).startswith(
        _MISSING_IN_SQLITE
    )


def _reason(error: sa.exc.SQLAlchemyError) -> str:
    origin = error.orig if isinstance(error, sa.exc.DBAPIError) else None
    cause = error if origin is None else origin
    text = str(cause)
    match cause.args:
        case int(number), str(said):  # PyMySQL's error, which would be shown as a tuple
            text = f"{said} (error {number})"
    text = text.partition(_WHOLE_ROW)[0]
    text = " ".join(text.split()) or type(cause).__name__
    return mask_secrets(text)[:_ERROR_CHARACTERS_MAX]
