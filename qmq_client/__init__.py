"""Transactional messages: sent if and only if the database transaction commits.

Names are loaded when they are first used, so that importing this costs nothing: no database driver,
no HTTP library. Some are called like the module they live in; the public name is what the package
shows, and `from qmq_client.consumer import …` works as well.
"""

import sys as _sys
from importlib import import_module as _import_module
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from qmq_client.consumer import Consumers, Delivery, consumer, pull
    from qmq_client.errors import QmqError
    from qmq_client.inbox import Inbox
    from qmq_client.message import Message
    from qmq_client.retry import Reject, Retry

_MODULES = {
    "Consumers": "qmq_client.consumer",
    "Delivery": "qmq_client.consumer",
    "Inbox": "qmq_client.inbox",
    "Message": "qmq_client.message",
    "QmqError": "qmq_client.errors",
    "Reject": "qmq_client.retry",
    "Retry": "qmq_client.retry",
    "consumer": "qmq_client.consumer",
    "pull": "qmq_client.consumer",
}

__all__ = [
    "Consumers",
    "Delivery",
    "Inbox",
    "Message",
    "QmqError",
    "Reject",
    "Retry",
    "consumer",
    "pull",
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
    """Importing a submodule puts it into its package; a public name is not covered by that."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _MODULES or not isinstance(value, _ModuleType):
            super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Face
