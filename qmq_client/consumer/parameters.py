"""Determines the arguments of a handler from its parameters, once at decoration.

=====================================  =======================================================
annotation `Message`                   the message; so does a parameter without one named
                                       `message`
annotation `Delivery`                  the delivery; likewise the name `delivery`
annotation `Session`, `AsyncSession`,  the open session of the inbox
name `session`
anything else, once                    the body, as the annotated type
=====================================  =======================================================

With a batch size above 1 each of them but the session is a list. A parameter with a default that
follows the body is left to the handler. With a first parameter `self` or `cls` it is a method,
which is called on the object it is bound to.

The decoder of the body is made once per handler. A body that does not match the type raises
`ProtocolError`: the message is rejected at once, because a later attempt would fail too.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import partial
from typing import Any, Final

import msgspec
import msgspec.inspect

from qmq_client.consumer.delivery import Delivery
from qmq_client.errors import ConfigurationError
from qmq_client.message import Message, decode_body, not_decoded
from qmq_client.typed import json_decoder
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.record import BodyKind, Record

Decoder = Callable[[Record], Any]


def body_decoder(body_type: Any) -> Decoder:
    """A function from a record to its body; raises `TypeError` for a type that cannot be decoded."""
    plain = plain_type(body_type)
    if plain in {Any, object}:
        return lambda record: decode_body(record.body_kind, record.body)
    if plain is bytes:
        return lambda record: record.body
    takes_bytes = bytes in map(plain_type, _members(plain))
    takes_text = str in _members(body_type)
    decode_json = _json_decoder(body_type)
    name = getattr(body_type, "__name__", str(body_type))

    def decode(record: Record) -> Any:
        kind = record.body_kind
        if kind is BodyKind.JSON:
            return decode_json(record.body)
        if (takes_bytes and kind is BodyKind.BYTES) or (takes_text and kind is BodyKind.TEXT):
            return decode_body(kind, record.body)
        wrong = f"body is {kind.name.lower()}, the handler expects {name}"
        if kind is BodyKind.BYTES:
            raise ProtocolError(wrong)
        # An enum of texts, a UUID: a type that JSON represents as text may have been sent as text.
        try:
            return decode_json(msgspec.json.encode(decode_body(kind, record.body)))
        except ProtocolError as error:
            raise ProtocolError(f"{wrong}: {error}") from None

    return decode


def plain_type(annotation: Any) -> Any:
    """The type behind `Annotated`, a `NewType` or an alias of `type`."""
    while True:
        if typing.get_origin(annotation) is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":  # since Python 3.12
            annotation = annotation.__value__
        else:
            return annotation


def _json_decoder(body_type: Any) -> Callable[[bytes], Any]:
    if hasattr(body_type, "model_validate_json"):  # a pydantic model
        return lambda body: decode_body(BodyKind.JSON, body, body_type)
    if _is_of_pydantic(body_type):
        return _pydantic_decoder(body_type)
    if isinstance(msgspec.inspect.type_info(body_type), msgspec.inspect.CustomType):
        raise TypeError(f"JSON cannot represent a {getattr(body_type, '__name__', body_type)}")
    decode = json_decoder(body_type).decode

    def decode_json(body: bytes) -> Any:
        try:
            return decode(body)
        except (ValueError, TypeError, RecursionError, msgspec.MsgspecError) as error:
            raise not_decoded(error) from None

    return decode_json


def _is_of_pydantic(body_type: Any, around: tuple[Any, ...] = ()) -> bool:
    """Whether only pydantic can check the type: it has pydantic's constraints, is a pydantic
    dataclass, or contains models.
    """
    if hasattr(body_type, "__pydantic_validator__"):
        return True
    if any(map(_is_rule_of_pydantic, getattr(body_type, "__metadata__", ()))):
        return True
    plain = plain_type(body_type)
    if plain in around:  # a type that contains itself
        return False
    return any(_is_of_pydantic(part, (*around, plain)) for part in _parts(plain))


def _parts(plain: Any) -> tuple[Any, ...]:
    """The types that a type is made of."""
    made_of = typing.get_args(plain)
    if not made_of and (is_dataclass(plain) or hasattr(plain, "__required_keys__")):
        made_of = tuple(typing.get_type_hints(plain, include_extras=True).values())
    return made_of


def _is_rule_of_pydantic(metadata: Any) -> bool:
    return type(metadata).__module__.partition(".")[0] == "pydantic"


def _pydantic_decoder(body_type: Any) -> Callable[[bytes], Any]:
    import pydantic  # pydantic is installed, because the type belongs to it

    try:
        validate = pydantic.TypeAdapter(body_type).validate_json
    except pydantic.errors.PydanticUserError as error:
        raise TypeError(str(error)) from error

    def decode_json(body: bytes) -> Any:
        try:
            return validate(body)
        except (ValueError, TypeError, AssertionError, RecursionError) as error:
            raise not_decoded(error) from None

    return decode_json


def _members(body_type: Any) -> frozenset[Any]:
    if typing.get_origin(body_type) in {typing.Union, types.UnionType}:
        return frozenset(typing.get_args(body_type))
    return frozenset({body_type})


_LISTS: Final = (list, Sequence, Iterable)
_SESSIONS: Final = {
    ("sqlalchemy.orm.session", "Session"),
    ("sqlalchemy.ext.asyncio.session", "AsyncSession"),
}


class Part(Enum):
    """The part of a delivery that a parameter takes."""

    MESSAGE = "message"
    DELIVERY = "delivery"
    SESSION = "session"
    BODY = "body"


_NAMES: Final = {part.value: part for part in Part}
#: Names of the first parameter of a method.
_OWNERS: Final = frozenset({"self", "cls"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The call of one handler."""

    #: In the order of the positional parameters.
    positional: tuple[Part, ...]
    keywords: tuple[tuple[str, Part], ...]
    #: None when the handler takes no body.
    decode: Decoder | None
    #: Whether it can be called only as the method of an object.
    is_method: bool = False
    #: `Session` or `AsyncSession`, as annotated in the handler; empty without an annotation.
    session_kind: str = ""

    @property
    def parts(self) -> frozenset[Part]:
        """All parts that the handler takes."""
        return frozenset((*self.positional, *(part for _, part in self.keywords)))


def resolve_parameters(
    function: Callable[..., Any], *, has_inbox: bool, is_batch: bool
) -> Parameters:
    """The parts for the parameters of `function`; raises `ConfigurationError` naming the parameter."""
    _check_kind(function)
    hints = _hints(function)
    positional: list[Part] = []
    keywords: list[tuple[str, Part]] = []
    decode: Decoder | None = None
    session_kind = ""
    has_skipped = False
    parameters = list(inspect.signature(function).parameters.values())
    is_method = bool(parameters) and parameters[0].name in _OWNERS
    for parameter in parameters[1:] if is_method else parameters:
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            raise _refuse(
                function, parameter.name, "stands for any number of parameters", "Name each one."
            )
        annotation = hints.get(parameter.name, parameter.empty)
        wanted = _element(function, parameter.name, annotation, is_batch=is_batch)
        part = _part(parameter.name, wanted, parameter.empty)
        if part is Part.BODY and parameter.default is not parameter.empty and decode is not None:
            has_skipped = True
            continue
        if part is Part.BODY and decode is not None:
            remedy = "Annotate all but one as Message, Delivery or Session."
            raise _refuse(function, parameter.name, "is a second parameter for the body", remedy)
        if part is Part.BODY:
            decode = _decoder(function, parameter.name, wanted, parameter.empty)
        if part is Part.SESSION and not has_inbox:
            remedy = "Give the consumer inbox=sessionmaker, or remove the parameter."
            raise _refuse(function, parameter.name, "asks for a session, without inbox", remedy)
        if part is Part.SESSION:
            session_kind = _session_kind(plain_type(wanted))
        if parameter.kind is parameter.KEYWORD_ONLY or has_skipped:
            keywords.append((parameter.name, part))
        else:
            positional.append(part)
    if not positional and not keywords:
        raise _refuse(function, "none", "the handler takes no message", "Give it a parameter.")
    return Parameters(
        positional=tuple(positional),
        keywords=tuple(keywords),
        decode=decode,
        is_method=is_method,
        session_kind=session_kind,
    )


def _check_kind(function: Callable[..., Any]) -> None:
    """Refuse functions whose call would do nothing, and objects that cannot store the mark of a handler."""
    shown = getattr(function, "__qualname__", repr(function))
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            setting=f"handler {shown}",
            value="has a yield: calling it runs nothing",
            remedy="Return instead, and put code around each call into a middleware.",
        )
    if isinstance(function, staticmethod | classmethod):
        kind = type(function).__name__
        raise ConfigurationError(
            setting=f"handler {shown}",
            value=f"a {kind} already",
            remedy=f"Write @{kind} above @consumer.",
        )
    # A partial is a routine for Python 3.14, where it binds like a method.
    is_fixed = inspect.ismethod(function) or isinstance(function, partial)
    if is_fixed or inspect.isbuiltin(function) or not inspect.isroutine(function):
        raise ConfigurationError(
            setting=f"handler {shown}",
            value=f"a {type(function).__name__}",
            remedy="Decorate a function that calls it.",
        )


def _part(name: str, annotation: Any, empty: Any) -> Part:
    plain = plain_type(annotation)
    if plain is Message:
        return Part.MESSAGE
    if plain is Delivery:
        return Part.DELIVERY
    if name == "session" or _session_kind(plain):
        return Part.SESSION
    return _NAMES.get(name, Part.BODY) if annotation is empty else Part.BODY


def _session_kind(annotation: Any) -> str:
    """`Session`, `AsyncSession` or an empty text."""
    # By name, so that a handler without a database needs no SQLAlchemy.
    for one in getattr(annotation, "__mro__", ()):
        if (one.__module__, one.__name__) in _SESSIONS:
            return str(one.__name__)
    return ""


def _element(function: Callable[..., Any], name: str, annotation: Any, *, is_batch: bool) -> Any:
    plain = plain_type(annotation)
    if not is_batch:
        if typing.get_origin(plain) in _LISTS and {Message, Delivery} & set(typing.get_args(plain)):
            shown = typing.get_args(plain)[0].__name__
            remedy = f"Set batch_size above 1, or annotate it {shown}."
            raise _refuse(function, name, f"is a list of {shown}, but batch_size is 1", remedy)
        return annotation
    if annotation is inspect.Parameter.empty:
        return annotation
    if name == "session" or _session_kind(plain) or plain is Any:
        return annotation
    if plain is list:
        return Any
    if typing.get_origin(plain) in _LISTS:
        return typing.get_args(plain)[0]
    shown = getattr(annotation, "__name__", str(annotation))
    raise _refuse(
        function,
        name,
        f"is annotated {shown}, but batch_size is above 1",
        f"Annotate it list[{shown}].",
    )


def _decoder(function: Callable[..., Any], name: str, annotation: Any, empty: Any) -> Decoder:
    try:
        return body_decoder(Any if annotation is empty else annotation)
    except (TypeError, ValueError) as error:
        remedy = "Give a dataclass, msgspec Struct, TypedDict, pydantic model, dict, str or bytes."
        raise _refuse(
            function, name, f"has a type that cannot be decoded ({error})", remedy
        ) from error


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(inspect.unwrap(function), include_extras=True)
    except (NameError, TypeError, AttributeError) as error:
        remedy = "Import each name in an annotation where the handler is defined."
        raise _refuse(function, "annotations", str(error), remedy) from error


def _refuse(function: Callable[..., Any], name: str, value: str, remedy: str) -> ConfigurationError:
    shown = getattr(function, "__qualname__", repr(function))
    return ConfigurationError(
        setting=f"handler {shown}, parameter {name}", value=value, remedy=remedy
    )
