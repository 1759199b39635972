"""`@consumer` marks a function as the handler of a subject for a group; middleware wraps its calls.

The function itself does not change and can be called and tested like any other. The decorator
stores the handler in an attribute of the function, where `Consumers` finds it.

A middleware is a function from a `HandlerCall` to a context manager, most easily written with
`@contextmanager`: the code before the `yield` runs before the handler, the code after it runs
afterwards. The middleware of `Consumers` is outside that of the handler, and the first of a list is
outermost. It runs where the handler runs (the same thread or task, inside the message's headers, the
open transaction of an inbox and the timeout): its exceptions count as the handler's, and its
messages join the transaction. If it swallows the handler's error, the call counts as returned.
Asynchronous context managers wrap asynchronous handlers only, plain ones wrap both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, TypeVar, Unpack, cast

from qmq_client.consumer.inbox_source import check_source
from qmq_client.consumer.options import ConsumerOptions, Start, check_settings
from qmq_client.consumer.parameters import Parameters, resolve_parameters
from qmq_client.errors import ConfigurationError
from qmq_client.retry import Backoff
from qmq_client.wire.shown import shorten

if TYPE_CHECKING:
    from qmq_client.consumer.inbox_source import InboxSource
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING

from qmq_client.consumer.delivery import Delivery

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerCall:
    """The handler call that a middleware wraps."""

    subject: str
    group: str
    #: One delivery, or those of a batch.
    deliveries: tuple[Delivery, ...]
    #: The open session of the inbox; None without one.
    session: Session | AsyncSession | None


Middleware = Callable[[HandlerCall], AbstractContextManager[Any] | AbstractAsyncContextManager[Any]]


def as_middleware(middleware: object) -> tuple[Middleware, ...]:
    """One middleware or several, as a tuple; raises `ConfigurationError` for other objects."""
    if callable(middleware):
        return (middleware,)
    listed = tuple(middleware) if isinstance(middleware, Iterable) else (middleware,)
    for one in listed:
        if not callable(one):
            raise _refuse(one, "is not callable")
    return listed


def check_plain(middleware: Iterable[Middleware], name: str) -> None:
    """Raise `ConfigurationError` if one of them cannot wrap the plain handler of this name."""
    for one in middleware:
        if inspect.isasyncgenfunction(inspect.unwrap(one)):
            raise _refuse(one, f"is asynchronous, the handler of {name} is not")


def plain_manager(middleware: Middleware, call: HandlerCall) -> AbstractContextManager[Any]:
    """The context manager for this call of a plain handler; raises `ConfigurationError`."""
    manager = middleware(call)
    if isinstance(manager, AbstractContextManager):
        return manager
    name = f"{call.subject}/{call.group}"
    raise _refuse(middleware, f"gives no context manager for the plain handler of {name}")


def _refuse(middleware: object, value: str) -> ConfigurationError:
    shown = shorten(getattr(middleware, "__qualname__", middleware))
    return ConfigurationError(
        setting="middleware",
        value=f"{shown} {value}",
        remedy="Give functions from a HandlerCall to a context manager (@contextmanager; around "
        "an `async def` handler also @asynccontextmanager).",
    )


_MARK: Final = "__qmq_handlers__"
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleDelivery:
    """An outcome that the broker refused: the lease had ended, so another consumer may have the message."""

    subject: str
    group: str
    #: 32 hex digits.
    message_id: str
    sequence: int
    attempt: int
    #: "ack", "nack" or "reject".
    outcome: str


OnStale = Callable[[tuple[StaleDelivery, ...]], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """A function with its subject, group and settings."""

    function: Callable[..., Any]
    options: ConsumerOptions
    parameters: Parameters
    is_async: bool
    #: Session factory, engine or `Inbox`; None for at-least-once effects.
    inbox: InboxSource | None = field(repr=False)
    #: Called with outcomes that came too late, on one of the consumer's threads.
    on_stale: OnStale | None
    #: Around each call, the first outermost.
    middleware: tuple[Middleware, ...] = ()

    def inside(self, middleware: tuple[Middleware, ...]) -> Handler:
        """This handler wrapped in more middleware; raises `ConfigurationError`."""
        if not self.is_async:
            check_plain(middleware, self.options.name)
        return replace(self, middleware=(*middleware, *self.middleware))


#: The first argument of `Consumers`: a list of handlers or modules, or a single one.
HandlerSource = Iterable[object] | Callable[..., object] | ModuleType | Handler


class ConsumerSettings(TypedDict, total=False):
    """The keyword arguments of `@consumer`, which describes each of them."""

    concurrency: int
    max_attempts: int
    lease_ms: int
    lease_ms_max: int
    timeout_ms: int
    batch_size: int
    max_wait_ms: int
    wait_ms: int
    prefetch_max: int
    start: Start
    auto_ack: bool
    tags: str | Iterable[str]
    all_tags: str | Iterable[str]
    ordered: bool
    at_most_once: bool
    broadcast: bool | Literal["named"]
    backoff: Backoff | None


def consumer(
    subject: str,
    *,
    group: str,
    inbox: InboxSource | None = None,
    on_stale: OnStale | None = None,
    middleware: Middleware | Iterable[Middleware] = (),
    **settings: Unpack[ConsumerSettings],
) -> Callable[[_Function], _Function]:
    """Make a function, sync or async, the handler of `subject` for `group`.

    Returning acks the message; raising nacks it with a growing delay, and raising `Retry` or `Reject`
    sets the delay or makes it a dead letter. With `inbox` (a sessionmaker or an engine; an async
    handler may also have an asynchronous one) the effect in that database happens once. `on_stale` is
    called with outcomes that came too late. `middleware` wraps each call, the first outermost
    (see `middleware.py`). The other settings, with their defaults:

    - `concurrency=1`: handler calls that may run at the same time in this process
    - `max_attempts=16`: deliveries of one message before it becomes a dead letter
    - `lease_ms=30_000`: how long the broker waits for a sign of life
    - `lease_ms_max=600_000`: the lease of a handler that runs longer ends, and its message is delivered again
    - `timeout_ms=0`: longest run of a call, whose messages are then nacked; 0 for no limit
    - `batch_size=1`: messages per call; above 1 the handler takes a list
    - `max_wait_ms=0`: how long messages may wait for a batch to fill
    - `wait_ms=1_000`: how long a pull waits at the broker for messages
    - `prefetch_max=0`: most prefetched messages; 0 for the default: 1,000, up to 3,000 with large
      batches, and with `at_most_once` only as many as can start at once
    - `start="earliest"`: where a new group begins; or "latest", a `datetime`, a sequence
    - `auto_ack=True`: False to settle each `Delivery` by hand
    - `tags=()`: only messages with at least one of these tags
    - `all_tags=()`: only messages with all of these tags
    - `ordered=False`: True to start a message only when the previous one of its key is settled
    - `at_most_once=False`: True to ack messages before they are handled: each is delivered once or lost
    - `broadcast=False`: True to give every message to every consumer; "named" to keep them for consumers that restart
    - `backoff=None`: a `Backoff`: how long the group waits before it redelivers a message

    Raises `ConfigurationError` when a setting or a parameter of the function cannot work. See
    `parameters.py` for the parameters that a function may have.
    """
    check_settings(settings)
    around = as_middleware(middleware)
    if on_stale is not None and not callable(on_stale):
        raise ConfigurationError(
            setting="on_stale", value=shorten(on_stale), remedy="Give a function."
        )
    options = ConsumerOptions(subject=subject, group=group, **cast(Any, settings))
    if inbox is not None:
        check_source(inbox)
        _check_with_inbox(options)

    def mark(function: _Function) -> _Function:
        handler = make_handler(function, options, inbox=inbox, on_stale=on_stale)
        handler = handler.inside(around)
        setattr(function, _MARK, (*getattr(function, _MARK, ()), handler))
        return function

    return mark


def _check_with_inbox(options: ConsumerOptions) -> None:
    remedies = {
        "auto_ack": (
            options.auto_ack,
            "With an inbox a message is acked after the commit; leave it at True.",
        ),
        "at_most_once": (
            not options.at_most_once,
            "An inbox is for messages that may be delivered again; leave one of the two out.",
        ),
        "broadcast": (
            not options.broadcast,
            "An inbox stores an id once for the whole group; leave one of the two out.",
        ),
    }
    for setting, (is_fine, remedy) in remedies.items():
        if not is_fine:
            value = f"{getattr(options, setting)!r}, with an inbox"
            raise ConfigurationError(setting=setting, value=value, remedy=remedy)


def make_handler(
    function: Callable[..., Any],
    options: ConsumerOptions,
    *,
    inbox: InboxSource | None = None,
    on_stale: OnStale | None = None,
) -> Handler:
    """The handler of a function, without marking it."""
    return Handler(
        function=function,
        options=options,
        parameters=resolve_parameters(
            function, has_inbox=inbox is not None, is_batch=options.batch_size > 1
        ),
        is_async=inspect.iscoroutinefunction(function),
        inbox=inbox,
        on_stale=on_stale,
    )


def collect_handlers(sources: HandlerSource) -> list[Handler]:
    """The handlers of functions and modules; raises `ConfigurationError` for a module without handlers."""
    handlers: list[Handler] = []
    for source in _listed(sources):
        found = _handlers_of(source)
        if not found:
            raise ConfigurationError(
                setting="consumers",
                value=f"{shorten(getattr(source, '__name__', source))} has no handler",
                remedy="Give modules, or functions decorated with @consumer(subject, group=…).",
            )
        handlers += [handler for handler in found if handler not in handlers]
    if not handlers:
        raise ConfigurationError(
            setting="consumers", value="empty", remedy="Give at least one handler or module."
        )
    names = [handler.options.name for handler in handlers]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(
                setting="consumers",
                value=f"two handlers for {name} (subject/group)",
                remedy="Give one of them another group, or they take each other's messages.",
            )
    return handlers


def _listed(sources: object) -> Iterable[object]:
    # A text must not count as a list of its letters: it is a module name, or the broker's address in the wrong place.
    if isinstance(sources, Iterable) and not isinstance(sources, str):
        return sources
    return (sources,)


def _handlers_of(source: object) -> list[Handler]:
    if isinstance(source, Handler):
        return [source]
    if isinstance(source, ModuleType):
        values = list(vars(source).values())
        return [handler for value in values for handler in _marked(value)]
    if isinstance(source, list | tuple):
        return [handler for value in source for handler in _handlers_of(value)]
    return _marked(source)


def _marked(value: object) -> list[Handler]:
    # Only functions: other objects may have any attribute.
    if not inspect.isroutine(value):
        return []
    marks = getattr(value, _MARK, ())
    return [_bound(mark, value) for mark in marks if isinstance(mark, Handler)]


def _bound(handler: Handler, function: Callable[..., Any]) -> Handler:
    """The handler with its function as passed in: a bound method, or the function with further decorators."""
    is_bound = inspect.ismethod(function)
    if is_bound == handler.parameters.is_method:
        is_async = handler.is_async or inspect.iscoroutinefunction(function)
        return replace(handler, function=function, is_async=is_async)
    value, remedy = (
        ("a method without self", "Call its first parameter self, or cls.")
        if is_bound
        else ("a method without its object", "Give the method of an object, such as Shop().book.")
    )
    shown = handler.function.__qualname__
    raise ConfigurationError(setting=f"handler {shown}", value=value, remedy=remedy)
