"""The errors that an application can meet, as one tree.

::

    QmqError                          (qmq_client.wire.errors)
    ├── InvalidMessageError …         the message breaks a rule; nothing was written
    ├── ProtocolError …               bytes that do not follow their format
    ├── ConfigurationError            a setting is wrong; names setting, value and remedy
    ├── OutboxError                   a send could not join the transaction; nothing was written
    │   ├── NoTransactionError        no open transaction to join
    │   ├── AutocommitError           the connection commits every statement by itself
    │   ├── WrongDatabaseError        the transaction is not on the database of the outbox
    │   ├── OutboxMissingError        the outbox or inbox table is missing or not as expected
    │   ├── OutboxRowLostError        a row of this transaction vanished before its commit
    │   ├── InboxRowLostError         the database took an id for the inbox and stored no row
    │   └── InboxTransactionError     a handler ended the transaction that its inbox had opened
    ├── HandlerTimeoutError           a handler ran longer than its `timeout_ms`
    ├── DatabaseUnavailableError      the database did not answer, or failed; try again later
    └── TransportError                the broker did not accept
        ├── BrokerUnreachableError    no connection or no answer; outcome unknown, try again
        │   └── NotTheBrokerError     something else answered, like a proxy; try again
        ├── BrokerBusyError           it accepts nothing now; try again after `retry_after_s`
        ├── BrokerRefusedError        it will never accept this request; carries the reason
        │   └── BrokerAccessError     it does not know the caller (401), or forbids the request (403)
        ├── BrokerOlderError          it does not know the request: it is older than this program
        └── BrokerAnswerError         its answer does not fit the request; outcome unknown, try again

Exceptions of drivers and of the HTTP library are translated in one place and kept as the cause.
"""

from __future__ import annotations

from dataclasses import dataclass

from qmq_client.wire.errors import (
    ChecksumError,
    EncodingError,
    InvalidMessageError,
    InvalidNameError,
    ProtocolError,
    QmqError,
    TooLargeError,
    UnknownVersionError,
)
from qmq_client.wire.requests import ErrorAnswer

__all__ = [
    "AutocommitError",
    "BrokerAccessError",
    "BrokerAnswerError",
    "BrokerBusyError",
    "BrokerOlderError",
    "BrokerRefusedError",
    "BrokerUnreachableError",
    "ChecksumError",
    "ConfigurationError",
    "DatabaseUnavailableError",
    "EncodingError",
    "HandlerTimeoutError",
    "InboxRowLostError",
    "InboxTransactionError",
    "InvalidMessageError",
    "InvalidNameError",
    "NoTransactionError",
    "NotTheBrokerError",
    "OutboxError",
    "OutboxMissingError",
    "OutboxRowLostError",
    "ProtocolError",
    "QmqError",
    "TooLargeError",
    "TransportError",
    "UnknownVersionError",
    "WrongDatabaseError",
]


@dataclass(kw_only=True, eq=False, repr=False)
class ConfigurationError(QmqError, ValueError):
    """A setting has a value that cannot work."""

    setting: str

    code = "configuration"
    text = "{setting}: {value}. {remedy}"


class OutboxError(QmqError):
    """A message could not join the transaction; nothing was written for it."""

    code = "outbox"


class NoTransactionError(OutboxError):
    """There is no open transaction for the message to join.

    Pass `session=`, send inside `@transactional`, or use `send_now`, which opens its own transaction.
    """

    code = "no_transaction"


class AutocommitError(OutboxError):
    """The connection commits every statement by itself, so a rollback would leave the message."""

    code = "autocommit"


class WrongDatabaseError(OutboxError):
    """The transaction is not on the database of this producer's outbox."""

    code = "wrong_database"


class OutboxMissingError(OutboxError):
    """The outbox or inbox table is missing, or differs from what this version needs."""

    code = "outbox_missing"


class OutboxRowLostError(OutboxError):
    """A row written earlier in this transaction was gone before the commit.

    The database undid part of the transaction without the application's knowledge (a swallowed
    error, a deadlock). The commit was stopped: roll back and try the whole transaction again.
    """

    code = "outbox_row_lost"


class DatabaseUnavailableError(QmqError):
    """The database could not be reached, or failed; the same request may succeed later."""

    code = "database_unavailable"


class InboxTransactionError(OutboxError):
    """A handler committed or rolled back the transaction that its inbox had opened.

    Leave both to the consumer: it commits when the handler returns and rolls back when it raises.
    """

    code = "inbox_transaction"
    text = (
        "the handler, or an error that it swallowed, ended the inbox's transaction; "
        "leave commit and rollback to the consumer, or raise to undo"
    )


@dataclass(kw_only=True, eq=False, repr=False)
class InboxRowLostError(OutboxError):
    """The database accepted an id for the inbox, or reported it as known, but has no row with it.

    A trigger or row security drops or alters the row. Without it the effect could happen twice or
    never, so nothing that the handler did is committed, and the message is delivered again. `qmq
    doctor` looks for the cause.
    """

    table: str
    #: Some of the ids.
    message_ids: str

    code = "inbox_row_lost"
    text = (
        "{table} has no row for an id that it accepted or reported as known: a trigger or row "
        "security drops or alters rows ({message_ids}). Nothing was stored, and the message will be redelivered. `qmq doctor` looks for the cause"
    )


@dataclass(kw_only=True, eq=False, repr=False)
class HandlerTimeoutError(QmqError):
    """A handler ran longer than its `timeout_ms`; its messages were returned to the broker.

    Make it faster, or raise `timeout_ms`. An asynchronous handler was cancelled; a plain one runs on.
    """

    timeout_ms: int

    code = "handler_timeout"
    text = "the handler ran longer than its timeout_ms, {timeout_ms}: make it faster, or raise timeout_ms"


class TransportError(QmqError):
    """The broker did not accept the request."""

    code = "transport"


class BrokerUnreachableError(TransportError):
    """There was no connection to the broker, or no complete answer; the outcome is unknown."""

    code = "broker_unreachable"


@dataclass(kw_only=True, eq=False, repr=False)
class NotTheBrokerError(BrokerUnreachableError):
    """Something other than a broker answered at its address: a proxy, a gateway, another service.

    The request is not at fault, and the state of the broker is unknown: treat it as an outage of
    the connection. The text names the address and the answer.
    """

    url: str
    answer: str
    #: The HTTP status, if the answer was HTTP.
    status: int = 0
    remedy: str = "Check the address, and the proxy or gateway in front of the broker."

    code = "not_the_broker"
    text = "{url}: {answer}, which is not an answer of a broker. {remedy}"


class BrokerBusyError(TransportError):
    """The broker accepts nothing now (408, 429, 503, 507); nothing was accepted of this request."""

    code = "broker_busy"


class BrokerRefusedError(TransportError):
    """The broker will never accept this request as it is; nothing was accepted.

    The text holds the broker's reason and remedy; `answer` has both as fields, and the faulty part of the request.
    """

    code = "broker_refused"

    text = "{status} {answer.code}: {message}"

    def __init__(self, status: int, answer: ErrorAnswer) -> None:
        self.status = status
        #: The broker's answer.
        self.answer = answer
        super().__init__(
            answer.message,
            field=answer.field,
            limit=answer.limit,
            value=answer.value,
            remedy=answer.remedy,
            message_id=answer.message_id,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.remedy and self.remedy not in self.message:
            self.args = (f"{self.args[0]}. {self.remedy}",)


class BrokerAccessError(BrokerRefusedError):
    """The broker does not know the caller (401), or forbids the request (403); nothing was accepted.

    Use a token that it knows (`QMQ_BROKER_TOKEN`, `[broker] token_file`), or give the token the
    missing role: the text and `answer` hold the broker's reason.
    """

    code = "broker_access"


class BrokerOlderError(TransportError):
    """The broker does not know this request: it is older than this program; nothing was done.

    Update the broker, or use the commands of its version.
    """

    code = "broker_older"


class BrokerAnswerError(TransportError):
    """The broker's answer does not fit the request; the outcome is unknown."""

    code = "broker_answer"
