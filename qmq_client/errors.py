"""The errors an application can meet, as one tree.

::

    QmqError                          (qmq_client.wire.errors)
    ├── InvalidMessageError …         the message breaks a rule; nothing was written
    ├── ProtocolError …               bytes that are not what their format says
    ├── ConfigurationError            a setting is wrong; names setting, value and remedy
    ├── OutboxError                   a send could not join the transaction; nothing was written
    │   ├── NoTransactionError        no open transaction to join
    │   ├── AutocommitError           the connection commits every statement by itself
    │   ├── WrongDatabaseError        the transaction runs on another database than the outbox
    │   ├── OutboxMissingError        the outbox or inbox table is not there or not as expected
    │   ├── OutboxRowLostError        a row of this transaction vanished before its commit
    │   └── InboxTransactionError     a handler ended the transaction that its inbox had opened
    ├── HandlerTimeoutError       a handler ran longer than its `timeout_ms`
    ├── DatabaseUnavailableError  the database gave no answer or failed; try again later
    └── TransportError                the broker did not accept
        ├── BrokerUnreachableError    no connection or no answer; outcome unknown, try again
        ├── BrokerBusyError           it asks to come back later; try again after `retry_after_s`
        ├── BrokerRefusedError        it will never accept this request; carries the reason
        │   └── BrokerAccessError     it does not know the caller (401), or forbids it this (403)
        └── BrokerAnswerError         its answer makes no sense; outcome unknown, try again

A foreign exception (driver, HTTP library) is translated at one door and kept as the cause.
"""

from __future__ import annotations

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
    "BrokerRefusedError",
    "BrokerUnreachableError",
    "ChecksumError",
    "ConfigurationError",
    "DatabaseUnavailableError",
    "EncodingError",
    "HandlerTimeoutError",
    "InboxTransactionError",
    "InvalidMessageError",
    "InvalidNameError",
    "NoTransactionError",
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


class ConfigurationError(QmqError, ValueError):
    """A setting has a value that cannot work."""

    code = "configuration"

    def __init__(self, *, setting: str, value: str, remedy: str) -> None:
        super().__init__(f"{setting}: {value}. {remedy}")
        self.setting = setting
        self.value = value
        self.remedy = remedy


class OutboxError(QmqError):
    """A message could not join the transaction; nothing was written for it."""

    code = "outbox"


class NoTransactionError(OutboxError):
    """There is no open transaction for the message to join.

    Give `session=`, send inside `@transactional`, or use `send_now` for a message of its own.
    """

    code = "no_transaction"


class AutocommitError(OutboxError):
    """The connection commits every statement by itself, so a rollback would leave the message."""

    code = "autocommit"


class WrongDatabaseError(OutboxError):
    """The transaction runs on another database than this producer's outbox."""

    code = "wrong_database"


class OutboxMissingError(OutboxError):
    """The outbox table is missing or not as this version needs it."""

    code = "outbox_missing"


class OutboxRowLostError(OutboxError):
    """A row written earlier in this transaction is gone before the commit.

    The database undid part of the transaction behind the application's back (a swallowed error,
    a deadlock). The commit was stopped: roll back and try the whole transaction again.
    """

    code = "outbox_row_lost"


class DatabaseUnavailableError(QmqError):
    """The database could not be reached, or failed; what was asked of it may work later."""

    code = "database_unavailable"


class InboxTransactionError(OutboxError):
    """A handler committed or rolled back the transaction that its inbox had opened.

    Leave that to the consumer: it commits when the handler returns and rolls back when it raises.
    """

    code = "inbox_transaction"

    def __init__(self) -> None:
        super().__init__(
            "the handler ended the transaction of its inbox, or an error did that it swallowed; "
            "leave commit and rollback to the consumer, or raise to undo"
        )


class HandlerTimeoutError(QmqError):
    """A handler ran longer than its `timeout_ms`; its messages were given back.

    Make it quicker, or raise `timeout_ms`. An asynchronous one was cancelled; a plain one goes on.
    """

    code = "handler_timeout"

    def __init__(self, timeout_ms: int) -> None:
        super().__init__(f"the handler ran longer than its timeout_ms, {timeout_ms}")
        self.timeout_ms = timeout_ms


class TransportError(QmqError):
    """The broker did not accept the request."""

    code = "transport"


class BrokerUnreachableError(TransportError):
    """No connection to the broker, or none of its answer arrived; the outcome is unknown."""

    code = "broker_unreachable"


class BrokerBusyError(TransportError):
    """The broker asks to come back later (429, 503, 507); nothing was accepted."""

    code = "broker_busy"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BrokerRefusedError(TransportError):
    """The broker will never accept this request as it is; nothing was accepted."""

    code = "broker_refused"

    def __init__(self, status: int, answer: ErrorAnswer) -> None:
        super().__init__(f"{status} {answer.code}: {answer.message}")
        self.status = status
        #: What the broker said: code, field, limit, remedy and the message at fault, if one.
        self.answer = answer


class BrokerAccessError(BrokerRefusedError):
    """The broker does not know the caller (401), or does not let it do this (403).

    Nothing was accepted. Give a token that it knows (`QMQ_BROKER_TOKEN`, `[broker] token_file`), or
    give that token the role: what the broker said is in the text and in `answer`.
    """

    code = "broker_access"

    def __init__(self, status: int, answer: ErrorAnswer) -> None:
        super().__init__(status, answer)
        if answer.remedy:
            self.args = (f"{self.args[0]}. {answer.remedy}",)


class BrokerAnswerError(TransportError):
    """The answer is not one that this request can have; the outcome is unknown."""

    code = "broker_answer"
