"""Decodes the actions of a frame of the action log, and refuses kinds and fields of later versions."""

from __future__ import annotations

from typing import Any, Final, get_args

from msgspec import inspect

from qmq_broker.errors import UnknownFormatError
from qmq_client.group.actions import Action, GroupAction
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.requests import decode_msgpack

_KINDS: Final[dict[int, type[GroupAction]]] = {
    kind.__struct_config__.tag: kind for kind in get_args(Action)
}
#: This version knows the kinds from 1 to this.
KIND_MAX: Final = max(_KINDS)


def decode_actions(content: bytes) -> list[Action]:
    """The actions of one frame; raises `ProtocolError`.

    Raises `UnknownFormatError` if a later version wrote an action of an unknown kind, or with unknown
    fields. That is not damage, but the actions around it must not be interpreted.
    """
    try:
        return decode_msgpack(content, list[Action])
    except ProtocolError:
        _refuse_later(content)
        raise


def _refuse_later(content: bytes) -> None:
    try:
        actions = decode_msgpack(content, list[list[Any]])
    except ProtocolError:
        return
    tagged = [(one[0], one) for one in actions if one and type(one[0]) is int]
    later = max((tag for tag, _ in tagged), default=0)
    if later > KIND_MAX:
        raise UnknownFormatError(
            setting="an action", found=f"of kind {later}", known=f"kinds 1 to {KIND_MAX}"
        )
    for tag, fields in tagged:
        if tag in _KINDS and _has_later_field(fields[1:], inspect.type_info(_KINDS[tag])):
            raise UnknownFormatError(
                setting="an action", found=f"of kind {tag} with more fields", known="fewer"
            )


def _has_later_field(value: object, known: inspect.Type) -> bool:
    """Whether the fields in `value` are more than this version knows, at any depth."""
    if isinstance(known, inspect.UnionType):
        return any(_has_later_field(value, one) for one in known.types)
    if not isinstance(known, inspect.StructType) or not isinstance(value, list):
        return False
    fields: list[object] = value
    is_longer = len(fields) > len(known.fields)
    return is_longer or any(
        _has_later_field(one, field.type) for one, field in zip(fields, known.fields, strict=False)
    )
