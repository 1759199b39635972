"""The messages that the benchmarks send: 1-KiB bodies that do not repeat, with key, tag and header."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import islice
from typing import Final

from qmq_client.ids import MESSAGE_IDS
from qmq_client.message import Message
from qmq_client.message import encode_message as encode_with_id
from qmq_client.wire.frame import build_message_frame

SUBJECT: Final = "flight.departed"
BODY_BYTES: Final = 1024
BATCH_MESSAGES: Final = 500
#: Bodies that take turns: enough that no cache of a processor holds them all.
BODIES: Final = 4096
_SEED: Final = 7
_TIME_BYTES: Final = 8


def make_messages() -> Iterator[Message]:
    """Messages without end, each a new object."""
    source = random.Random(_SEED)
    bodies = [source.randbytes(BODY_BYTES) for _ in range(BODIES)]
    headers = {"trace": "00-4bf92f3577b34da6a3ce929d0e0e4736"}
    while True:
        for body in bodies:
            yield Message(SUBJECT, body, key="N14228", tags=("severe",), headers=headers)


def encode_message(message: Message) -> bytes:
    """What a send of this message costs: a new id and the encoded record."""
    return encode_with_id(message, MESSAGE_IDS.next_id(), time.time_ns() // 1_000_000)[1]


def make_frame(messages: Iterator[Message], count: int) -> bytes:
    """A frame of the next `count` messages, encoded one by one."""
    return build_message_frame(
        {SUBJECT: [encode_message(message) for message in islice(messages, count)]}
    )


def stamped_body() -> bytes:
    """A body that says when it was made, by the clock that all processes of a machine share."""
    return time.monotonic_ns().to_bytes(_TIME_BYTES, "big").ljust(BODY_BYTES, b".")


def age_ns(body: bytes) -> int:
    """Nanoseconds since a body of `stamped_body` was made, in whatever process."""
    now_ns = time.monotonic_ns()
    return now_ns - int.from_bytes(body[:_TIME_BYTES], "big")
