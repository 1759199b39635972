"""Encodes bodies as JSON, and refuses values that JSON cannot express or that some readers could not decode.

msgspec alone writes NaN as null, writes keys that become equal in JSON, and allows as many levels
as the stack, which depends on the version of Python and on the thread.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

#: Levels of lists and objects: half of what Python 3.11 can read, so that a handler that is called
#: deep in the stack can read it too.
LEVELS_MAX: Final = 500
#: Types of values that contain no others.
_SINGLE: Final = frozenset({str, int, float, bool, type(None), bytes})
_CONTAINERS: Final = (dict, list, tuple, set, frozenset)


def encode_json(body: Any) -> bytes:
    """The body in JSON; raises `ValueError`, `TypeError`, or any error of a model."""
    dump = getattr(body, "model_dump_json", None)
    data: bytes = dump().encode() if dump is not None else msgspec.json.encode(body)
    # NaN and infinities are written as null, which would alter the body. Without a null in the output,
    # the values need not be checked.
    if b"null" in data:
        builtins = msgspec.to_builtins(body) if dump is None else body.model_dump()
        if _has_non_finite(builtins):
            raise ValueError("JSON has no NaN and no infinities")
    if dump is None and type(body) not in _SINGLE:
        _check_containers(body)
    return data


def _has_non_finite(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(_has_non_finite, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_has_non_finite, value))
    return False


def _check_containers(body: Any) -> None:
    """Raise for keys of one mapping that are equal in JSON, like 1 and "1", and for too many levels."""
    level, levels = [body], 0
    while level:
        inside: list[Any] = []
        for value in level:
            container = value if isinstance(value, _CONTAINERS) else msgspec.to_builtins(value)
            if not isinstance(container, _CONTAINERS):
                continue
            if levels == LEVELS_MAX:
                raise ValueError(f"more than {LEVELS_MAX} levels of lists and objects")
            if isinstance(container, dict):
                if len(set(map(type, container))) > 1:
                    _check_names(container)
                container = container.values()
            inside += [each for each in container if type(each) not in _SINGLE]
        level, levels = inside, levels + 1


def _check_names(value: dict[Any, Any]) -> None:
    names = msgspec.to_builtins(dict.fromkeys(value), str_keys=True)
    if len(names) < len(value):
        raise ValueError("two keys of one mapping are the same name in JSON")
