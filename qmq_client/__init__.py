"""Transactional messages: sent if and only if the database transaction commits.

Names are loaded on first use, so importing this package costs nothing: no database driver, no HTTP
library. Some public names equal the name of their module (`consumer`, `request_headers`). Such an
attribute of the package is always the public object, but `from qmq_client.consumer import …` works
as well.
"""

import sys as _sys
from importlib import import_module as _import_module
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from qmq_client.consumer import Consumers, Delivery, HandlerCall, StopReport, consumer, pull
    from qmq_client.current import current_session
    from qmq_client.errors import (
        AutocommitError,
        BrokerAccessError,
        ConfigurationError,
        InvalidMessageError,
        NoTransactionError,
        OutboxError,
        OutboxMissingError,
        OutboxRowLostError,
        QmqError,
        TransportError,
        WrongDatabaseError,
    )
    from qmq_client.inbox import Inbox
    from qmq_client.inbox.async_inbox import AsyncInbox
    from qmq_client.message import Message
    from qmq_client.options import ProducerOptions
    from qmq_client.outbox.table import (
        Tables,
        create_tables,
        create_tables_async,
        make_tables,
        metadata,
    )
    from qmq_client.producer import Producer
    from qmq_client.publishing.receipts import Receipt, SendOutcome
    from qmq_client.publishing.stats import Flushed, PublisherStats
    from qmq_client.request_headers import request_headers
    from qmq_client.retry import Backoff, Reject, Retry
    from qmq_client.transactional import transaction, transactional
    from qmq_client.transport.address import BrokerAddress
    from qmq_client.wire.delayed import Cancellation

_MODULES = {
    "AsyncInbox": "qmq_client.inbox.async_inbox",
    "AutocommitError": "qmq_client.errors",
    "Backoff": "qmq_client.retry",
    "BrokerAccessError": "qmq_client.errors",
    "BrokerAddress": "qmq_client.transport.address",
    "Cancellation": "qmq_client.wire.delayed",
    "ConfigurationError": "qmq_client.errors",
    "Consumers": "qmq_client.consumer",
    "Delivery": "qmq_client.consumer",
    "SendOutcome": "qmq_client.publishing.receipts",
    "Flushed": "qmq_client.publishing.stats",
    "HandlerCall": "qmq_client.consumer",
    "Inbox": "qmq_client.inbox",
    "InvalidMessageError": "qmq_client.errors",
    "Message": "qmq_client.message",
    "NoTransactionError": "qmq_client.errors",
    "OutboxError": "qmq_client.errors",
    "OutboxMissingError": "qmq_client.errors",
    "OutboxRowLostError": "qmq_client.errors",
    "Producer": "qmq_client.producer",
    "ProducerOptions": "qmq_client.options",
    "PublisherStats": "qmq_client.publishing.stats",
    "QmqError": "qmq_client.errors",
    "Receipt": "qmq_client.publishing.receipts",
    "Reject": "qmq_client.retry",
    "Retry": "qmq_client.retry",
    "StopReport": "qmq_client.consumer",
    "Tables": "qmq_client.outbox.table",
    "TransportError": "qmq_client.errors",
    "WrongDatabaseError": "qmq_client.errors",
    "consumer": "qmq_client.consumer",
    "create_tables": "qmq_client.outbox.table",
    "create_tables_async": "qmq_client.outbox.table",
    "current_session": "qmq_client.current",
    "make_tables": "qmq_client.outbox.table",
    "metadata": "qmq_client.outbox.table",
    "pull": "qmq_client.consumer",
    "request_headers": "qmq_client.request_headers",
    "transaction": "qmq_client.transactional",
    "transactional": "qmq_client.transactional",
}

__all__ = [
    "AsyncInbox",
    "AutocommitError",
    "Backoff",
    "BrokerAccessError",
    "BrokerAddress",
    "Cancellation",
    "ConfigurationError",
    "Consumers",
    "Delivery",
    "Flushed",
    "HandlerCall",
    "Inbox",
    "InvalidMessageError",
    "Message",
    "NoTransactionError",
    "OutboxError",
    "OutboxMissingError",
    "OutboxRowLostError",
    "Producer",
    "ProducerOptions",
    "PublisherStats",
    "QmqError",
    "Receipt",
    "Reject",
    "Retry",
    "SendOutcome",
    "StopReport",
    "Tables",
    "TransportError",
    "WrongDatabaseError",
    "consumer",
    "create_tables",
    "create_tables_async",
    "current_session",
    "make_tables",
    "metadata",
    "pull",
    "request_headers",
    "transaction",
    "transactional",
]


def __getattr__(name: str) -> _Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Face(_ModuleType):
    """The package's class: keeps the import of a submodule from replacing a public name."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _MODULES or not isinstance(value, _ModuleType):
            super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Face
