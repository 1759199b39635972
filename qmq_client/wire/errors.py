"""The errors of the ground floor, and the root of every error of this product.

::

    QmqError                     anything this product raises on purpose
    ├── InvalidMessageError      the caller's message breaks a rule; change the message
    │   ├── InvalidNameError     a subject, group, consumer, tag or header name
    │   ├── TooLargeError        a length or count over its limit
    │   └── EncodingError        a value that cannot be turned into bytes
    └── ProtocolError            bytes that are not what their format says; change the sender
        ├── ChecksumError        whole in shape, but altered
        └── UnknownVersionError  written by another version of this product

Higher floors add their own branches: `qmq_client.errors`, `qmq_broker.errors`, `qmq_pipeline.errors`.
"""

from __future__ import annotations

from typing import Any


class QmqError(Exception):
    """Something went wrong that this product foresaw."""

    #: Stable, machine-readable name of the error; part of the HTTP interface.
    code = "error"

    def __reduce__(self) -> tuple[Any, ...]:
        # An error goes from worker to parent in pools of processes. Exceptions are copied by calling
        # them with their text, which fails for those made of named fields and takes the pool down.
        return _copy_error, (type(self), self.args, vars(self))


class InvalidMessageError(QmqError, ValueError):
    """The message breaks a rule and was refused before anything was written.

    Carries `field`, `limit`, `value` and `remedy`, so that a program need not parse the text.
    """

    code = "invalid_message"

    def __init__(self, *, field: str, limit: str, value: str, remedy: str) -> None:
        super().__init__(f"{field}: {value}; allowed: {limit}. {remedy}")
        #: Which part of the message is wrong.
        self.field = field
        #: The rule it breaks, in words or as a number with its unit.
        self.limit = limit
        #: What was given, shortened.
        self.value = value
        #: What to do about it.
        self.remedy = remedy


class InvalidNameError(InvalidMessageError):
    """A name does not match the grammar of names."""

    code = "invalid_name"


class TooLargeError(InvalidMessageError):
    """A length or a count is over its limit."""

    code = "too_large"


class EncodingError(InvalidMessageError):
    """A value cannot be turned into bytes."""

    code = "not_encodable"


class ProtocolError(QmqError):
    """Bytes do not follow the format they claim to have; nothing of them was used.

    `what` names the field, `offset` is its byte offset in the input, or None where it has none.
    """

    code = "protocol_error"

    def __init__(self, what: str, *, offset: int | None = None) -> None:
        place = "" if offset is None else f" (at byte {offset})"
        super().__init__(f"{what}{place}")
        self.what = what
        self.offset = offset


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
