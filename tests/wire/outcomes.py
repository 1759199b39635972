"""What encoding and decoding make of a case, to be compared between the compiled modules and Python.

Run as a program it answers pickled cases on standard input one by one, until the input ends.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import astuple

from qmq_client.message import (
    Message,
    decode_message,
    encode_message,
    message_to_record,
    record_to_message,
)
from qmq_client.wire import record
from qmq_client.wire.record import Record, decode_record, encode_record, verify_record

CALLS: Final[dict[str, Callable[..., Any]]] = {
    "encode": lambda values, limits: encode_record(Record(*values), limits),
    "decode": lambda subject, data: astuple(decode_record(subject, data)),
    "verify": verify_record,
    "to record": lambda fields, limits: astuple(
        message_to_record(Message(**fields), new_id=bytes(16), now_ms=10**12, limits=limits)
    ),
    "to message": lambda values: record_to_message(Record(*values)),
    "encode message": lambda fields, limits: encode_message(
        Message(**fields), bytes(16), 10**12, limits
    ),
    "decode message": decode_message,
}
#: Of the one error of a built-in type that is raised here.
_OURS: Final = "a record is bytes"


def outcome(call: str, *arguments: Any) -> str:
    """The value, or the error; with its words unless they are the interpreter's own."""
    try:
        return repr(CALLS[call](*arguments))
    except Exception as error:
        is_ours = type(error).__module__.startswith("qmq_client") or _OURS in str(error)
        return f"{type(error).__name__}: {error if is_ours else ''}"


def is_compiled() -> bool:
    """Whether the modules that are loaded here are compiled."""
    return not str(record.__file__).endswith(".py")


def _answer() -> None:
    while True:
        try:
            case = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump((is_compiled(), outcome(*case)), sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _answer()
