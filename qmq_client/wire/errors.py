"""The errors of the wire, and the root of every error of this product.

::

    QmqError                     anything this product raises on purpose
    ├── InvalidMessageError      the caller's message breaks a rule; change the message
    │   ├── InvalidNameError     a subject, group, consumer, tag or header name
    │   ├── TooLargeError        a length or count over its limit
    │   └── EncodingError        a value that cannot be turned into bytes
    └── ProtocolError            bytes that do not follow their format; change the sender
        ├── ChecksumError        valid in shape, but altered
        └── UnknownVersionError  written by another version of this product

Other packages add their own branches: `qmq_client.errors`, `qmq_broker.errors`, `qmq_pipeline.errors`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar


@dataclass(eq=False, repr=False)
class QmqError(Exception):
    """The base class of all errors that this product raises on purpose.

    A subclass declares further fields, its `code`, and the format of its text. A broker's
    answer has the same fields, so that no program needs to parse the text.
    """

    #: What happened.
    message: str = ""
    _: KW_ONLY
    #: The part of the message, request or state that is wrong.
    field: str = ""
    #: The rule that it breaks, in words or as a number with its unit.
    limit: str = ""
    #: The given or found value, shortened.
    value: str = ""
    #: The remedy.
    remedy: str = ""
    #: The invalid message, if a single one is the cause.
    message_id: str = ""
    #: Seconds after which to try again; 0 if unknown.
    retry_after_s: float = 0.0

    #: Stable, machine-readable name of the error; part of the HTTP interface.
    code = "error"
    #: The status of the HTTP answer with this error.
    status = 500
    #: The format of the text from the fields; empty: the message, and the remedy if there is one.
    text: ClassVar[str] = ""

    def __post_init__(self) -> None:
        text = self.text or ("{message}. {remedy}" if self.remedy else "{message}")
        self.args = (text.format_map(vars(self)),)

    def __reduce__(self) -> tuple[Any, ...]:
        # An error is sent from worker to parent in process pools. By default exceptions are copied
        # by calling them with their text, which fails for errors with named fields and breaks the
        # pool.
        return _copy_error, (type(self), self.args, vars(self))


class InvalidMessageError(QmqError, ValueError):
    """The message breaks a rule and was refused before anything was written."""

    code = "invalid_message"
    status = 422
    text = "{field}: {value}; allowed: {limit}. {remedy}"


class InvalidNameError(InvalidMessageError):
    """A name does not match the grammar of names."""

    code = "invalid_name"


class TooLargeError(InvalidMessageError):
    """A length or a count is over its limit."""

    code = "too_large"


class EncodingError(InvalidMessageError):
    """A value cannot be turned into bytes."""

    code = "not_encodable"


@dataclass(kw_only=True, eq=False, repr=False)
class ProtocolError(QmqError):
    """Bytes do not follow their declared format; no part of them was used."""

    #: Byte position of the fault in the input; None without a position.
    offset: int | None = None

    code = "protocol_error"
    status = 400

    def __post_init__(self) -> None:
        place = "" if self.offset is None else f" (at byte {self.offset})"
        self.args = (f"{self.message}{place}",)


class ChecksumError(ProtocolError):
    """A checksum does not match: the bytes were altered after they were made."""

    code = "checksum_mismatch"


class UnknownVersionError(ProtocolError):
    """The bytes were written by a version of the format that this program does not know."""

    code = "unknown_version"


def _copy_error(kind: type[QmqError], args: tuple[Any, ...], fields: dict[str, Any]) -> QmqError:
    error = kind.__new__(kind, *args)
    vars(error).update(fields)
    return error
